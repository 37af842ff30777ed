// All histories of an engine, by key, within a quota of bytes and a number of keys; what was used least lately goes
// first.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "history.h"
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
    size_t num_histories = size_t{1} << 16;
    double ttl_s = 86400;  // histories that were not used for so long are dropped
  };

  HistoryTable(Limits limits, bool is_strict) : limits_(limits), is_strict_(is_strict) {}

  // The history of a key, used at the engine's `clock`; nullptr: histories in use fill the table.
  std::shared_ptr<History> Find(const std::string& history_namespace, const std::string& stage, uint64_t clock);
  // Appends to a history; of a huge text the end stays.
  void Store(History& history, History::Chain& chain, std::span<const FiledToken> tokens, TextSource source);
  // Brings the table back within its limits.
  void ForgetOldest();
  // Drops some of the histories that outlived `ttl_s`: a few a call, so that every call is short.
  void ForgetExpired(uint64_t clock, Clock::time_point now);
  // Drops the histories that nobody has used for `max_age_s` seconds; returns the number of their tokens.
  size_t ForgetUnused(double max_age_s);
  // Drops those of a namespace and of those within it; returns the number of their tokens.
  size_t Delete(std::string_view history_namespace);

  // Those of a namespace and of those within it, ordered by namespace and stage.
  std::vector<std::shared_ptr<History>> Within(std::string_view history_namespace) const;
  size_t num_bytes() const { return num_bytes_; }
  size_t num_histories() const { return histories_.size(); }
  size_t NumTokens() const;
  void CheckIntegrity() const;

 private:
  static bool IsHeld(const std::shared_ptr<History>& history) { return history.use_count() > 1; }
  template <typename Predicate>
  std::shared_ptr<History>* FindOldest(Predicate&& is_wanted);
  template <typename Predicate>
  size_t EraseIf(Predicate&& is_wanted);
  void Enqueue(std::shared_ptr<History>& history);
  void Erase(const History& history);

  Limits limits_;
  bool is_strict_;
  size_t num_bytes_ = 0;  // of all histories
  uint64_t num_created_ = 0;
  std::unordered_map<std::string, std::shared_ptr<History>> histories_;
  // By History::place. Using a history leaves its place as it is, so that it costs nothing: a place is no later than
  // the last use, and is put right when it comes first.
  std::map<History::Place, std::shared_ptr<History>*> oldest_first_;
};

}  // namespace agentspec
