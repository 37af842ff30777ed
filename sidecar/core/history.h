// What all requests of one history key have written: a context index in two generations, so that forgetting the oldest
// half is one deallocation.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "context_index.h"
#include "types.h"

namespace agentspec {

struct NamespaceAccount;

// "default/salt-1" is a part of "default"; so is "default" itself.
inline bool IsWithinNamespace(std::string_view inner, std::string_view outer) {
  return inner.starts_with(outer) && (inner.size() == outer.size() || inner[outer.size()] == '/');
}

class History : public std::enable_shared_from_this<History> {
 public:
  // Where a request's text ends in the history.
  struct Chain {
    uint32_t generation = 0;
    uint32_t page = ContextIndex::kNoPage;
  };
  // Tokens by workflow.
  using Written = std::unordered_map<uint16_t, size_t>;

  // `workflow`: the only one that writes it; none: all workflows of the stage share it.
  History(std::string history_namespace, std::string stage, bool is_strict, std::optional<uint16_t> workflow = {})
      : history_namespace(std::move(history_namespace)),
        stage(std::move(stage)),
        workflow(workflow),
        is_strict_(is_strict),
        current_(std::make_shared<ContextIndex>(is_strict)) {}

  // Appends `tokens` to `chain`; returns how many: fewer when the current generation is full.
  size_t Append(Chain& chain, std::span<const FiledToken> tokens, TextSource source);

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

  size_t CurrentBytes() const { return current_->MemoryBytes() + current_written_.size() * kWriterBytes; }
  size_t MemoryBytes() const {
    return sizeof(*this) + CurrentBytes() +
           (previous_ ? previous_->MemoryBytes() + previous_written_.size() * kWriterBytes : 0);
  }
  size_t num_tokens() const { return current_->num_tokens() + (previous_ ? previous_->num_tokens() : 0); }
  bool is_empty() const { return current_->is_empty() && !previous_; }
  void CheckIntegrity() const;

  const Written& current_written() const { return current_written_; }
  const Written& previous_written() const { return previous_written_; }
  // Whether text of another workflow is in it.
  bool HasOtherWriters(uint16_t writer) const;
  // The workflow whose text it holds; none: several, or no text.
  std::optional<uint16_t> SoleWriter() const;

  const std::string history_namespace;
  const std::string stage;
  const std::optional<uint16_t> workflow;
  uint64_t last_used = 0;  // step of the engine in which it was last read or written
  std::chrono::steady_clock::time_point last_used_at;

  // What its HistoryTable keeps of it.
  using Place = std::pair<uint64_t, uint64_t>;  // last use as far as an order knows it, number
  uint64_t number = 0;
  std::array<Place, 3> places;          // by UseOrder::Level
  NamespaceAccount* account = nullptr;  // nullptr: it is in no table
  std::optional<uint16_t> owner;        // SoleWriter() as far as the accounts know it

 private:
  static constexpr size_t kWriterBytes = 40;  // about, of an entry of Written

  bool is_strict_;
  uint32_t generation_ = 1;
  std::shared_ptr<ContextIndex> current_;
  std::shared_ptr<ContextIndex> previous_;
  Written current_written_, previous_written_;
};

}  // namespace agentspec
