#include "history_table.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>

namespace agentspec {

namespace {

constexpr size_t kStoredAtOnce = 256;  // tokens between two looks at the quota
constexpr int kExpiredAtOnce = 8;      // histories that one call looks at
constexpr size_t kGenerationsPerQuota = 4;

std::string Key(std::string_view history_namespace, std::string_view stage, std::optional<uint16_t> workflow) {
  if (workflow) return JoinNames({history_namespace, stage, std::to_string(*workflow)});
  return JoinNames({history_namespace, stage});
}

}  // namespace

std::string JoinNames(std::initializer_list<std::string_view> names) {
  std::string key;
  for (auto name : names) key += std::to_string(name.size()) + ":" + std::string(name);
  return key;
}

HistoryTable::HistoryTable(Limits limits, bool is_strict)
    : limits_(limits),
      namespace_bytes_(std::min(limits.namespace_bytes, limits.num_bytes)),
      generation_bytes_(namespace_bytes_ / kGenerationsPerQuota),
      is_strict_(is_strict) {}

void HistoryTable::Tick(uint64_t clock, Clock::time_point now) {
  clock_ = clock;
  now_ = now;
  for (int i = 0; i < kExpiredAtOnce; ++i) {
    History* oldest = order_.FindOldest([](const auto&) { return true; });
    if (oldest == nullptr) return;
    if (std::chrono::duration<double>(now - oldest->last_used_at).count() <= limits_.ttl_s) return;
    if (!IsHeld(*oldest)) {
      Erase(*oldest);
    } else {
      oldest->last_used = clock;  // an open request uses it all along
      oldest->last_used_at = now;
    }
  }
}

std::shared_ptr<History> HistoryTable::Find(const std::string& history_namespace, const std::string& stage,
                                            std::optional<uint16_t> workflow) {
  auto& slot = histories_[Key(history_namespace, stage, workflow)];
  bool is_new = slot == nullptr;
  if (is_new) slot = std::make_shared<History>(history_namespace, stage, is_strict_, workflow);
  slot->last_used = clock_;
  slot->last_used_at = now_;
  std::shared_ptr<History> history = slot;  // held, so that it stays
  if (!is_new) return history;
  Add(*history);
  Limit(*history->account);
  ForgetOldest();
  if (num_bytes_ <= limits_.num_bytes && history->account->num_bytes <= namespace_bytes_ &&
      histories_.size() <= limits_.num_histories)
    return history;
  // Open requests hold all that is left: this one goes without a history.
  Erase(*history);
  return nullptr;
}

std::shared_ptr<History> HistoryTable::FindExisting(const std::string& history_namespace, const std::string& stage,
                                                    std::optional<uint16_t> workflow) {
  auto found = histories_.find(Key(history_namespace, stage, workflow));
  return found == histories_.end() ? nullptr : found->second;
}

bool HistoryTable::IsCrowding(const History& history, uint16_t workflow) const {
  const NamespaceAccount& account = *history.account;
  // Most histories are small, or one workflow's: no need to look at the accounts.
  bool is_large = history.CurrentBytes() > generation_bytes_ / 2 || account.num_bytes > namespace_bytes_ / 2;
  if (!is_large || !history.HasOtherWriters(workflow)) return false;
  if (account.BytesOf(workflow) > static_cast<double>(namespace_bytes_) / 2) return true;
  const History::Written& written = history.current_written();
  auto found = written.find(workflow);
  if (found == written.end()) return false;
  size_t num_written = 0;
  for (const auto& [writer, num_tokens] : written) num_written += num_tokens;
  return static_cast<double>(history.CurrentBytes()) * static_cast<double>(found->second) >
         static_cast<double>(generation_bytes_) / 2 * static_cast<double>(num_written);
}

bool HistoryTable::Store(History& history, History::Chain& chain, std::span<const FiledToken> tokens,
                         TextSource source) {
  bool is_allowed = TakeAllowance(history.account->workflows[source.workflow], tokens.size());
  if (is_allowed) {
    Append(history, chain, tokens, source);
  } else {
    chain = {};  // what follows is another text
    Drop(tokens.size());
  }
  return is_allowed;
}

bool HistoryTable::TakeAllowance(WorkflowAccount& workflow, size_t num_tokens) const {
  if (std::isinf(limits_.tokens_per_s)) return true;
  std::chrono::duration<double> age = now_ - workflow.filled_at;  // huge for a new account, which may fill up at once
  workflow.allowance = std::min(workflow.allowance + age.count() * limits_.tokens_per_s, limits_.tokens_per_s);
  workflow.filled_at = now_;
  if (workflow.allowance <= 0) return false;
  workflow.allowance -= static_cast<double>(num_tokens);
  return true;
}

void HistoryTable::Append(History& history, History::Chain& chain, std::span<const FiledToken> tokens,
                          TextSource source) {
  NamespaceAccount& account = *history.account;
  while (!tokens.empty()) {
    auto some = tokens.first(std::min(tokens.size(), kStoredAtOnce));
    size_t bytes_before = history.MemoryBytes();
    size_t num_appended = history.Append(chain, some, source);
    account.num_written += num_appended;
    account.workflows[source.workflow].num_written += num_appended;
    Grow(account, history.MemoryBytes() - bytes_before);
    if (num_appended < some.size() || history.CurrentBytes() > namespace_bytes_ / 2) Rotate(history);
    tokens = tokens.subspan(num_appended);
  }
  if (history.CurrentBytes() > generation_bytes_) Rotate(history);
  Refile(history);
  if (account.BytesOf(source.workflow) > static_cast<double>(namespace_bytes_) / 2) account.largest = source.workflow;
  Limit(account);
}

void HistoryTable::Grow(NamespaceAccount& account, size_t num_bytes) {
  num_bytes_ += num_bytes;
  account.num_bytes += num_bytes;
  if (account.num_bytes > limits_.num_bytes / 2) largest_ = &account;
}

void HistoryTable::Credit(History& history) {
  for (const auto* written : {&history.current_written(), &history.previous_written()}) {
    for (const auto& [workflow, num_tokens] : *written) {
      history.account->num_written += num_tokens;
      history.account->workflows[workflow].num_written += num_tokens;
    }
  }
  Grow(*history.account, history.MemoryBytes());
}

void HistoryTable::Debit(History& history) {
  for (const auto* written : {&history.current_written(), &history.previous_written()}) {
    for (const auto& [workflow, num_tokens] : *written) {
      history.account->num_written -= num_tokens;
      history.account->workflows[workflow].num_written -= num_tokens;
    }
  }
  num_bytes_ -= history.MemoryBytes();
  history.account->num_bytes -= history.MemoryBytes();
}

void HistoryTable::Refile(History& history) {
  auto owner = history.SoleWriter();
  if (owner == history.owner) return;
  auto& workflows = history.account->workflows;
  if (history.owner) workflows[*history.owner].owned.Remove(history);
  history.owner = owner;
  if (!owner) return;
  UseOrder& owned = workflows[*owner].owned;
  owned.Add(history);
  if (owned.size() > limits_.num_histories / 2) history.account->most_numerous = owner;
}

void HistoryTable::Add(History& history) {
  history.number = num_created_++;
  history.account = &accounts_[history.history_namespace];
  history.account->histories.Add(history);
  order_.Add(history);
  Credit(history);
  if (history.account->histories.size() > limits_.num_histories / 2) most_numerous_ = history.account;
}

void HistoryTable::Remove(History& history) {
  Debit(history);
  NamespaceAccount& account = *history.account;
  if (history.owner) account.workflows[*history.owner].owned.Remove(history);
  account.histories.Remove(history);
  order_.Remove(history);
  history.owner.reset();
  history.account = nullptr;
  DropUnused(account, history.current_written());
  DropUnused(account, history.previous_written());
  if (account.histories.size() > 0) return;
  if (largest_ == &account) largest_ = nullptr;
  if (most_numerous_ == &account) most_numerous_ = nullptr;
  accounts_.erase(history.history_namespace);
}

void HistoryTable::Erase(History& history) {
  Remove(history);
  histories_.erase(Key(history.history_namespace, history.stage, history.workflow));
}

void HistoryTable::Rotate(History& history) {
  History::Written dropped = history.previous_written();
  Debit(history);
  history.Rotate();
  Credit(history);
  Refile(history);
  DropUnused(*history.account, dropped);
}

void HistoryTable::DropUnused(NamespaceAccount& account, const History::Written& written) {
  for (const auto& [workflow, num_tokens] : written) {
    auto found = account.workflows.find(workflow);
    if (found == account.workflows.end()) continue;
    const WorkflowAccount& share = found->second;
    if (share.num_written == 0 && share.allowance >= 0 && share.owned.size() == 0) account.workflows.erase(found);
  }
}

void HistoryTable::Shrink(History& history) {
  if (history.is_empty())
    Erase(history);
  else
    Rotate(history);
}

WorkflowAccount* HistoryTable::FindLargest(NamespaceAccount& account) {
  if (!account.largest) return nullptr;
  auto found = account.workflows.find(*account.largest);
  bool is_large =
      found != account.workflows.end() && account.BytesOf(*account.largest) > static_cast<double>(namespace_bytes_) / 2;
  return is_large ? &found->second : nullptr;
}

History* HistoryTable::FindVictim(NamespaceAccount* account) {
  bool is_one = account != nullptr;
  if (!is_one && largest_ != nullptr && largest_->num_bytes > limits_.num_bytes / 2) account = largest_;
  if (account != nullptr) {
    WorkflowAccount* largest = FindLargest(*account);
    if (History* victim = largest == nullptr ? nullptr : largest->owned.FindOldest(CanShrink)) return victim;
    if (History* victim = account->histories.FindOldest(CanShrink); victim != nullptr || is_one) return victim;
  }
  return order_.FindOldest(CanShrink);
}

void HistoryTable::Limit(NamespaceAccount& account) {
  while (account.num_bytes > namespace_bytes_) {
    History* victim = FindVictim(&account);
    if (victim == nullptr) return;  // open requests hold all that is left, and it is empty
    Shrink(*victim);
  }
}

History* HistoryTable::FindSpare() {
  auto is_spare = [](const History& history) { return !IsHeld(history); };
  size_t half = limits_.num_histories / 2;
  if (most_numerous_ != nullptr && most_numerous_->histories.size() > half) {
    auto& workflows = most_numerous_->workflows;
    auto found = most_numerous_->most_numerous ? workflows.find(*most_numerous_->most_numerous) : workflows.end();
    if (found != workflows.end() && found->second.owned.size() > half)
      if (History* spare = found->second.owned.FindOldest(is_spare)) return spare;
    if (History* spare = most_numerous_->histories.FindOldest(is_spare)) return spare;
  }
  return order_.FindOldest(is_spare);
}

void HistoryTable::ForgetOldest() {
  while (num_bytes_ > limits_.num_bytes) {
    History* victim = FindVictim(nullptr);
    if (victim == nullptr) break;
    Shrink(*victim);
  }
  while (histories_.size() > limits_.num_histories) {
    History* spare = FindSpare();
    if (spare == nullptr) break;
    Erase(*spare);
  }
}

template <typename Predicate>
size_t HistoryTable::EraseIf(Predicate&& is_wanted) {
  size_t num_tokens = 0;
  std::erase_if(histories_, [&](const auto& entry) {
    History& history = *entry.second;
    if (!is_wanted(history)) return false;
    num_tokens += history.num_tokens();
    Remove(history);
    return true;
  });
  return num_tokens;
}

size_t HistoryTable::ForgetUnused(double max_age_s) {
  auto now = Clock::now();
  return EraseIf([&](const History& history) {
    return !IsHeld(history) && std::chrono::duration<double>(now - history.last_used_at).count() >= max_age_s;
  });
}

size_t HistoryTable::Delete(std::string_view history_namespace) {
  return EraseIf(
      [&](const History& history) { return IsWithinNamespace(history.history_namespace, history_namespace); });
}

std::vector<std::shared_ptr<History>> HistoryTable::Within(std::string_view history_namespace) const {
  std::vector<std::shared_ptr<History>> histories;
  for (const auto& [key, history] : histories_)
    if (IsWithinNamespace(history->history_namespace, history_namespace)) histories.push_back(history);
  auto key = [](const auto& history) {
    return std::tie(history->history_namespace, history->stage, history->workflow);
  };
  std::sort(histories.begin(), histories.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return histories;
}

size_t HistoryTable::NumTokens() const {
  size_t num_tokens = 0;
  for (const auto& [key, history] : histories_) num_tokens += history->num_tokens();
  return num_tokens;
}

void HistoryTable::CheckIntegrity() const {
  auto check = [](bool fact, const char* what) {
    if (!fact) throw std::runtime_error(std::string("histories: ") + what);
  };
  size_t num_bytes = 0;
  std::unordered_map<const NamespaceAccount*, std::pair<size_t, size_t>> sums;
  for (const auto& [key, history] : histories_) {
    history->CheckIntegrity();
    const NamespaceAccount* account = history->account;
    check(account != nullptr && order_.Holds(*history) && account->histories.Holds(*history),
          "the order of use is wrong");
    check(history->owner == history->SoleWriter(), "an owner is not the sole writer");
    check(!history->owner || account->workflows.at(*history->owner).owned.Holds(*history), "an owner lacks a history");
    num_bytes += history->MemoryBytes();
    sums[account].first += history->MemoryBytes();
    for (const auto* written : {&history->current_written(), &history->previous_written()})
      for (const auto& [workflow, num_tokens] : *written) sums[account].second += num_tokens;
  }
  check(num_bytes == num_bytes_, "their bytes do not add up");
  check(order_.size() == histories_.size() && accounts_.size() == sums.size(), "a place belongs to none");
  for (const auto& [name, account] : accounts_) {
    size_t num_written = 0;
    for (const auto& [workflow, share] : account.workflows) num_written += share.num_written;
    check(sums[&account] == std::pair(account.num_bytes, account.num_written) && num_written == account.num_written,
          "the account of a namespace is wrong");
    check(account.num_bytes <= namespace_bytes_, "a namespace exceeds its quota");
  }
}

}  // namespace agentspec
