#include "history_table.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

namespace agentspec {

namespace {

constexpr size_t kStoredAtOnce = 256;  // tokens between two looks at the quota
constexpr int kExpiredAtOnce = 8;      // histories that one call looks at
// A generation may fill a quarter of the quota, so that one busy history forgets in portions.
constexpr size_t kGenerationsPerQuota = 4;

std::string Key(const History& history) { return JoinNames({history.history_namespace, history.stage}); }

}  // namespace

std::string JoinNames(std::initializer_list<std::string_view> names) {
  std::string key;
  for (auto name : names) key += std::to_string(name.size()) + ":" + std::string(name);
  return key;
}

void HistoryTable::Enqueue(std::shared_ptr<History>& history) {
  history->place.first = history->last_used;
  oldest_first_.emplace(history->place, &history);
}

void HistoryTable::Erase(const History& history) {
  num_bytes_ -= history.MemoryBytes();
  oldest_first_.erase(history.place);
  histories_.erase(Key(history));
}

template <typename Predicate>
std::shared_ptr<History>* HistoryTable::FindOldest(Predicate&& is_wanted) {
  for (auto it = oldest_first_.begin(); it != oldest_first_.end();) {
    auto& history = *it->second;
    if (history->place.first != history->last_used) {
      it = oldest_first_.erase(it);
      Enqueue(history);
      // Its place may be the very next one.
      it = oldest_first_.lower_bound(it == oldest_first_.end() ? history->place : std::min(it->first, history->place));
    } else if (is_wanted(history)) {
      return &history;
    } else {
      ++it;
    }
  }
  return nullptr;
}

std::shared_ptr<History> HistoryTable::Find(const std::string& history_namespace, const std::string& stage,
                                            uint64_t clock) {
  auto& slot = histories_[JoinNames({history_namespace, stage})];
  bool is_new = slot == nullptr;
  if (is_new) {
    slot = std::make_shared<History>(history_namespace, stage, is_strict_);
    slot->place.second = num_created_++;
    num_bytes_ += slot->MemoryBytes();
  }
  slot->last_used = clock;
  slot->last_used_at = Clock::now();
  if (is_new) Enqueue(slot);
  std::shared_ptr<History> history = slot;  // held, so that it stays
  ForgetOldest();
  bool is_in_use = history.use_count() > 2;
  if (is_in_use || (num_bytes_ <= limits_.num_bytes && histories_.size() <= limits_.num_histories)) return history;
  // Open requests hold all that is left: this one goes without a history.
  Erase(*history);
  return nullptr;
}

void HistoryTable::Store(History& history, History::Chain& chain, std::span<const FiledToken> tokens,
                         TextSource source) {
  size_t bytes_before = history.MemoryBytes();
  while (!tokens.empty()) {
    auto some = tokens.first(std::min(tokens.size(), kStoredAtOnce));
    history.Append(chain, some, source);
    if (history.CurrentBytes() > limits_.num_bytes / 2) history.Rotate();
    tokens = tokens.subspan(some.size());
  }
  if (history.CurrentBytes() > limits_.num_bytes / kGenerationsPerQuota) history.Rotate();
  num_bytes_ += history.MemoryBytes() - bytes_before;
}

void HistoryTable::ForgetOldest() {
  while (num_bytes_ > limits_.num_bytes) {
    auto* oldest = FindOldest([](const auto& history) { return !history->is_empty() || !IsHeld(history); });
    if (oldest == nullptr) break;  // open requests hold all that is left, and it is empty
    History& history = **oldest;
    if (history.is_empty()) {
      Erase(history);
    } else {
      num_bytes_ -= history.MemoryBytes();
      history.Rotate();
      num_bytes_ += history.MemoryBytes();
    }
  }
  while (histories_.size() > limits_.num_histories) {
    auto* oldest = FindOldest([](const auto& history) { return !IsHeld(history); });
    if (oldest == nullptr) break;
    Erase(**oldest);
  }
}

void HistoryTable::ForgetExpired(uint64_t clock, Clock::time_point now) {
  for (int i = 0; i < kExpiredAtOnce; ++i) {
    auto* oldest = FindOldest([](const auto&) { return true; });
    if (oldest == nullptr) return;
    History& history = **oldest;
    if (std::chrono::duration<double>(now - history.last_used_at).count() <= limits_.ttl_s) return;
    if (!IsHeld(*oldest)) {
      Erase(history);
    } else {
      history.last_used = clock;  // an open request uses it all along
      history.last_used_at = now;
    }
  }
}

template <typename Predicate>
size_t HistoryTable::EraseIf(Predicate&& is_wanted) {
  size_t num_tokens = 0;
  std::erase_if(histories_, [&](const auto& entry) {
    const auto& history = entry.second;
    if (!is_wanted(history)) return false;
    num_tokens += history->num_tokens();
    num_bytes_ -= history->MemoryBytes();
    oldest_first_.erase(history->place);
    return true;
  });
  return num_tokens;
}

size_t HistoryTable::ForgetUnused(double max_age_s) {
  auto now = Clock::now();
  return EraseIf([&](const auto& history) {
    return !IsHeld(history) && std::chrono::duration<double>(now - history->last_used_at).count() >= max_age_s;
  });
}

size_t HistoryTable::Delete(std::string_view history_namespace) {
  return EraseIf([&](const auto& history) { return IsWithinNamespace(history->history_namespace, history_namespace); });
}

std::vector<std::shared_ptr<History>> HistoryTable::Within(std::string_view history_namespace) const {
  std::vector<std::shared_ptr<History>> histories;
  for (const auto& [key, history] : histories_)
    if (IsWithinNamespace(history->history_namespace, history_namespace)) histories.push_back(history);
  auto key = [](const auto& history) { return std::tie(history->history_namespace, history->stage); };
  std::sort(histories.begin(), histories.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return histories;
}

size_t HistoryTable::NumTokens() const {
  size_t num_tokens = 0;
  for (const auto& [key, history] : histories_) num_tokens += history->num_tokens();
  return num_tokens;
}

void HistoryTable::CheckIntegrity() const {
  size_t num_bytes = 0;
  for (const auto& [key, history] : histories_) {
    history->CheckIntegrity();
    num_bytes += history->MemoryBytes();
    auto place = oldest_first_.find(history->place);
    if (place == oldest_first_.end() || place->second->get() != history.get() ||
        history->place.first > history->last_used)
      throw std::runtime_error("histories: the order of use is wrong");
  }
  if (num_bytes != num_bytes_) throw std::runtime_error("histories: their bytes do not add up");
  if (oldest_first_.size() != histories_.size()) throw std::runtime_error("histories: a place belongs to none");
}

}  // namespace agentspec
