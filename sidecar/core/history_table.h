// All histories of an engine, by key, within quotas of bytes and a number of keys. What was used least lately goes
// first, but of a namespace or a workflow that has more than half, when others are there, its own goes first.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "history.h"
#include "history_account.h"
#include "types.h"

namespace agentspec {

// Length-prefixed, so that no choice of names makes two keys equal.
std::string JoinNames(std::initializer_list<std::string_view> names);

// Not thread-safe: the engine's lock guards it. A history that somebody else holds is in use.
class HistoryTable {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    size_t num_bytes = size_t{1} << 30;
    size_t namespace_bytes = SIZE_MAX;  // of the histories of one namespace
    size_t num_histories = size_t{1} << 16;
    double ttl_s = 86400;  // histories that were not used for so long are dropped
    double tokens_per_s = std::numeric_limits<double>::infinity();  // that one workflow may store; one second's at once
  };

  HistoryTable(Limits limits, bool is_strict);

  // The engine's clock and the time, for all that follows. Drops some of the histories that outlived `ttl_s`: a few a
  // call, so that every call is short.
  void Tick(uint64_t clock, Clock::time_point now);
  // The history of a key, now in use, made if there is none; nullptr: histories in use fill the table.
  std::shared_ptr<History> Find(const std::string& history_namespace, const std::string& stage,
                                std::optional<uint16_t> workflow = {});
  // nullptr: there is none.
  std::shared_ptr<History> FindExisting(const std::string& history_namespace, const std::string& stage,
                                        std::optional<uint16_t> workflow = {});
  // Whether more text of a workflow would crowd that of others out of a history that they share: it belongs into a
  // history of the workflow's own.
  bool IsCrowding(const History& history, uint16_t workflow) const;
  // Appends to a history, of a huge text the end; false: it did not, the workflow has stored too much of late.
  bool Store(History& history, History::Chain& chain, std::span<const FiledToken> tokens, TextSource source);
  // The same, however much the workflow has stored of late.
  void Append(History& history, History::Chain& chain, std::span<const FiledToken> tokens, TextSource source);
  // Counts tokens that could not be stored.
  void Drop(size_t num_tokens) { num_dropped_ += num_tokens; }
  // Brings the table back within its limits.
  void ForgetOldest();
  // Drops the histories that nobody has used for `max_age_s` seconds; returns the number of their tokens.
  size_t ForgetUnused(double max_age_s);
  // Drops those of a namespace and of those within it; returns the number of their tokens.
  size_t Delete(std::string_view history_namespace);

  // Those of a namespace and of those within it, ordered by namespace, stage and workflow.
  std::vector<std::shared_ptr<History>> Within(std::string_view history_namespace) const;
  size_t num_bytes() const { return num_bytes_; }
  size_t num_histories() const { return histories_.size(); }
  size_t NumTokens() const;
  uint64_t num_dropped() const { return num_dropped_; }
  void CheckIntegrity() const;

 private:
  static bool IsHeld(const History& history) { return history.weak_from_this().use_count() > 1; }
  static bool CanShrink(const History& history) { return !history.is_empty() || !IsHeld(history); }
  // The oldest that can shrink, by the rules above; `account`: of this namespace alone.
  History* FindVictim(NamespaceAccount* account);
  // The oldest that can go when there are too many.
  History* FindSpare();
  WorkflowAccount* FindLargest(NamespaceAccount& account);
  // Halves a history, or erases it when it is empty.
  void Shrink(History& history);
  void Rotate(History& history);
  // Brings a namespace back within its quota.
  void Limit(NamespaceAccount& account);
  void Add(History& history);
  void Remove(History& history);
  void Erase(History& history);
  template <typename Predicate>
  size_t EraseIf(Predicate&& is_wanted);
  // Takes a history's bytes and tokens into the accounts, or out of them.
  void Credit(History& history);
  void Debit(History& history);
  void Grow(NamespaceAccount& account, size_t num_bytes);
  void Refile(History& history);
  // Drops the accounts of workflows that have nothing left.
  static void DropUnused(NamespaceAccount& account, const History::Written& written);
  bool TakeAllowance(WorkflowAccount& workflow, size_t num_tokens) const;

  const Limits limits_;
  const size_t namespace_bytes_;   // of one namespace, never above the table's
  const size_t generation_bytes_;  // a history starts a new generation there, so that it forgets in portions
  const bool is_strict_;
  size_t num_bytes_ = 0;  // of all histories
  uint64_t num_created_ = 0;
  uint64_t num_dropped_ = 0;
  uint64_t clock_ = 0;
  Clock::time_point now_;
  std::unordered_map<std::string, std::shared_ptr<History>> histories_;
  std::unordered_map<std::string, NamespaceAccount> accounts_;
  UseOrder order_{UseOrder::kOfTable};
  NamespaceAccount* largest_ = nullptr;        // the namespace that last had more than half of the bytes
  NamespaceAccount* most_numerous_ = nullptr;  // ... of the histories
};

}  // namespace agentspec
