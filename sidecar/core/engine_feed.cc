// What an engine's requests wrote, for other engines, and what theirs wrote.
#include <algorithm>

#include "engine.h"

namespace agentspec {

namespace {

constexpr size_t kSharedAtOnce = 64;      // tokens of an open block that others should not wait for
constexpr size_t kBatchTokens = 1 << 14;  // of one SegmentBatch

}  // namespace

void Engine::ShareBlocks(size_t max_waiting_tokens) {
  std::lock_guard lock(mutex_);
  outbox_.Open(max_waiting_tokens);
}

bool Engine::WaitForBlocks(std::chrono::microseconds timeout) {
  std::unique_lock lock(mutex_);
  return has_shared_.wait_for(lock, timeout, [&] { return !outbox_.is_empty(); });
}

std::vector<SegmentBatch> Engine::TakeBlocks(std::vector<std::string>& namespaces) {
  std::lock_guard lock(mutex_);
  return outbox_.Take(kBatchTokens, namespaces);
}

uint64_t Engine::NumUnsharedTokens() const {
  std::lock_guard lock(mutex_);
  return outbox_.num_dropped_tokens();
}

void Engine::Share(Request& request, std::span<const FiledToken> tokens) {
  if (!outbox_.is_open()) return;
  Outgoing& outgoing = request.outgoing;
  bool has_block_ended = false;
  for (const FiledToken& filed : tokens) {
    if (filed.label == kPromptTailLabel) {
      outgoing.prompt_tail.push_back(filed.token);
      continue;
    }
    if (outgoing.tokens.empty()) outgoing.labels.push_back(filed.label);
    if (filed.token == kBlockStart) {
      outgoing.labels.push_back(filed.label);
      has_block_ended |= outgoing.offset + outgoing.tokens.size() > 0;
    }
    outgoing.tokens.push_back(filed.token);
  }
  if (has_block_ended || outgoing.tokens.size() >= kSharedAtOnce) Send(request, false);
}

void Engine::Withhold(Request& request, size_t num_tokens) {
  if (!outbox_.is_open()) return;
  Send(request, false);
  request.outgoing.offset += static_cast<uint32_t>(num_tokens);
}

void Engine::Send(Request& request, bool is_end) {
  Outgoing& outgoing = request.outgoing;
  if (!outbox_.is_open() || outgoing.tokens.empty()) return;
  Segment segment{request.source.writer, outgoing.offset, is_end, request.options.stage, {}};
  segment.text.workflow = request.source.workflow;
  outgoing.offset += static_cast<uint32_t>(outgoing.tokens.size());
  for (Label label : outgoing.labels) segment.text.paths.push_back(labels_.Path(label));
  outgoing.labels.clear();
  segment.text.prompt_tail = std::exchange(outgoing.prompt_tail, {});
  segment.text.tokens = std::exchange(outgoing.tokens, {});
  bool was_empty = outbox_.is_empty();
  outbox_.Push(request.options.history_namespace, std::move(segment));
  if (was_empty) has_shared_.notify_one();
}

size_t Engine::MergeBlocks(const std::string& history_namespace, std::string_view bytes, uint64_t origin) {
  size_t num_tokens = 0;
  for (const Segment& segment : ReadSegments(bytes, vocabulary_.size())) {
    std::lock_guard lock(mutex_);  // of one segment, so that steps go on between two
    histories_.Tick(clock_, Clock::now());
    num_tokens += MergeSegment(history_namespace, segment, origin);
    histories_.ForgetOldest();
  }
  return num_tokens;
}

size_t Engine::MergeSegment(const std::string& history_namespace, const Segment& segment, uint64_t origin) {
  auto history = histories_.Find(history_namespace, segment.stage);
  if (history && histories_.IsCrowding(*history, segment.text.workflow))
    history = histories_.Find(history_namespace, segment.stage, segment.text.workflow);
  if (!history) return 0;
  ForeignTexts::Key key{origin, segment.writer};
  ForeignText* text = foreign_texts_.Find(key);
  auto end = segment.offset + static_cast<uint32_t>(segment.text.tokens.size());
  if (text != nullptr && segment.offset < text->num_tokens) return 0;
  bool goes_on = text != nullptr && segment.offset == text->num_tokens && text->history.lock() == history;
  if (!goes_on)
    text = &foreign_texts_.Insert(
        key, {history, {}, TextWindow(options_.is_strict), {next_writer_++, segment.text.workflow}, 0});
  StoreArchived(*history, text->chain, text->window, text->source, segment.text);
  text->num_tokens = end;
  if (segment.is_end) foreign_texts_.Erase(key);
  return segment.text.tokens.size();
}

}  // namespace agentspec
