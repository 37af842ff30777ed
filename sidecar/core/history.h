// What all requests of one history key have written: a context index in two generations, so that forgetting the oldest
// half is one deallocation.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "context_index.h"
#include "types.h"

namespace agentspec {

// "default/salt-1" is a part of "default"; so is "default" itself.
inline bool IsWithinNamespace(std::string_view inner, std::string_view outer) {
  return inner.starts_with(outer) && (inner.size() == outer.size() || inner[outer.size()] == '/');
}

class History {
 public:
  // Where a request's text ends in the history.
  struct Chain {
    uint32_t generation = 0;
    uint32_t page = ContextIndex::kNoPage;
  };

  History(std::string history_namespace, std::string stage, bool is_strict)
      : history_namespace(std::move(history_namespace)),
        stage(std::move(stage)),
        is_strict_(is_strict),
        current_(std::make_shared<ContextIndex>(is_strict)) {}

  // Appends `tokens` to `chain`.
  void Append(Chain& chain, std::span<const FiledToken> tokens, TextSource source);

  // Prefetches what the next Append to `chain` writes first.
  void PrefetchEnd(const Chain& chain) const {
    if (chain.generation == generation_) current_->PrefetchPage(chain.page);
  }

  // Starts a new generation and drops the one before the current one.
  void Rotate();
  // The current generation and the one before it (nullptr if there is none).
  const ContextIndex* current() const { return current_.get(); }
  const ContextIndex* previous() const { return previous_.get(); }
  // Both, oldest first; they stay alive for a reader that lets go of the lock.
  std::vector<std::shared_ptr<const ContextIndex>> Generations() const;

  size_t CurrentBytes() const { return current_->MemoryBytes(); }
  size_t MemoryBytes() const { return sizeof(*this) + CurrentBytes() + (previous_ ? previous_->MemoryBytes() : 0); }
  size_t num_tokens() const { return current_->num_tokens() + (previous_ ? previous_->num_tokens() : 0); }
  bool is_empty() const { return current_->is_empty() && !previous_; }
  void CheckIntegrity() const;

  const std::string history_namespace;
  const std::string stage;
  using Place = std::pair<uint64_t, uint64_t>;
  Place place;             // in the HistoryTable's order of use: last use as far as the table knows it, number
  uint64_t last_used = 0;  // step of the engine in which it was last read or written
  std::chrono::steady_clock::time_point last_used_at;

 private:
  bool is_strict_;
  uint32_t generation_ = 1;
  std::shared_ptr<ContextIndex> current_;
  std::shared_ptr<ContextIndex> previous_;
};

}  // namespace agentspec
