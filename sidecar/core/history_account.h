// What each namespace, and each workflow in it, holds of a HistoryTable.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>

#include "history.h"

namespace agentspec {

// Histories by last use. Using a history leaves its place as it is, so that it costs nothing: a place is no later than
// the last use, and is put right when it comes first.
class UseOrder {
 public:
  enum Level { kOfTable = 0, kOfNamespace = 1, kOfOwner = 2 };  // a history has one place in an order of each

  explicit UseOrder(Level level) : level_(level) {}
  void Add(History& history) {
    history.places[level_] = {history.last_used, history.number};
    histories_.emplace(history.places[level_], &history);
  }
  void Remove(const History& history) { histories_.erase(history.places[level_]); }
  bool Holds(const History& history) const {
    auto found = histories_.find(history.places[level_]);
    return found != histories_.end() && found->second == &history && history.places[level_].first <= history.last_used;
  }
  size_t size() const { return histories_.size(); }
  // The one used least lately of those that are wanted; nullptr: none is.
  template <typename Predicate>
  History* FindOldest(Predicate&& is_wanted);

 private:
  Level level_;
  std::map<History::Place, History*> histories_;
};

struct WorkflowAccount {
  size_t num_written = 0;              // tokens in all histories of the namespace
  UseOrder owned{UseOrder::kOfOwner};  // histories that hold no other workflow's text
  double allowance = 0;                // tokens that it may store now
  std::chrono::steady_clock::time_point filled_at;
};

struct NamespaceAccount {
  size_t num_bytes = 0;
  size_t num_written = 0;  // tokens of all workflows
  UseOrder histories{UseOrder::kOfNamespace};
  std::unordered_map<uint16_t, WorkflowAccount> workflows;
  std::optional<uint16_t> largest;        // the workflow that last had more than half of the bytes
  std::optional<uint16_t> most_numerous;  // ... of the histories

  // Bytes of the namespace that are a workflow's, by its part of the tokens.
  double BytesOf(uint16_t workflow) const;
};

template <typename Predicate>
History* UseOrder::FindOldest(Predicate&& is_wanted) {
  for (auto it = histories_.begin(); it != histories_.end();) {
    History& history = *it->second;
    if (it->first.first != history.last_used) {
      it = histories_.erase(it);
      Add(history);
      // Its place may be the very next one.
      const History::Place& place = history.places[level_];
      it = histories_.lower_bound(it == histories_.end() ? place : std::min(it->first, place));
    } else if (is_wanted(history)) {
      return &history;
    } else {
      ++it;
    }
  }
  return nullptr;
}

}  // namespace agentspec
