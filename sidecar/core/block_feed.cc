#include "block_feed.h"

#include <utility>

namespace agentspec {

namespace {

constexpr uint64_t kVersion = 1;

class SegmentWriter : public ByteWriter {
 public:
  SegmentWriter() { Number(kVersion); }
  // A stage is written where it changes.
  void Add(const Segment& segment) {
    bool is_same_stage = stage_ == segment.stage && !is_first_;
    Number(uint64_t{segment.is_end} | uint64_t{is_same_stage} << 1);
    if (!is_same_stage) String(segment.stage);
    stage_ = segment.stage;
    is_first_ = false;
    Number(segment.writer);
    Number(segment.offset);
    Text(segment.text);
  }
  std::string Finish() && { return std::move(bytes_); }

 private:
  std::string stage_;
  bool is_first_ = true;
};

}  // namespace

std::vector<Segment> ReadSegments(std::string_view bytes, int32_t vocab_size) {
  ByteReader reader(bytes);
  if (uint64_t version = reader.Number(); version != kVersion)
    throw ArchiveError("blocks: expected version " + std::to_string(kVersion) + ", got " + std::to_string(version));
  std::vector<Segment> segments;
  std::string stage;
  while (!reader.is_done()) {
    uint64_t flags = reader.Number();
    if (flags > 3 || (segments.empty() && flags > 1)) throw ArchiveError("blocks: unknown flags");
    if (flags < 2) stage = reader.String();
    uint64_t writer = reader.Number(), offset = reader.Number();
    if (writer > UINT32_MAX || offset > UINT32_MAX / 2) throw ArchiveError("blocks: a number is out of its bound");
    segments.push_back({static_cast<uint32_t>(writer), static_cast<uint32_t>(offset), (flags & 1) != 0, stage,
                        reader.Text(vocab_size)});
  }
  return segments;
}

void Outbox::Push(const std::string& history_namespace, Segment segment) {
  num_tokens_ += segment.text.tokens.size();
  segments_.push_back({history_namespace, std::move(segment)});
  for (; num_tokens_ > max_tokens_; segments_.pop_front()) {
    size_t num_tokens = segments_.front().segment.text.tokens.size();
    num_tokens_ -= num_tokens;
    num_dropped_tokens_ += num_tokens;
  }
}

std::vector<SegmentBatch> Outbox::Take(size_t max_tokens, std::vector<std::string>& namespaces) {
  struct Open {
    size_t batch;
    SegmentWriter writer;
  };
  std::vector<SegmentBatch> batches;
  std::unordered_map<std::string, Open> open;
  auto finish = [&](Open& one) { batches[one.batch].bytes = std::move(one.writer).Finish(); };
  for (const auto& [history_namespace, segment] : segments_) {
    auto [found, is_new] = open.try_emplace(history_namespace);
    if (!is_new && batches[found->second.batch].num_tokens >= max_tokens) {
      finish(found->second);
      found->second = {};
      is_new = true;
    }
    if (is_new) {
      found->second.batch = batches.size();
      batches.push_back({history_namespace, 0, 0, {}});
    }
    SegmentBatch& batch = batches[found->second.batch];
    ++batch.num_segments;
    batch.num_tokens += segment.text.tokens.size();
    found->second.writer.Add(segment);
  }
  for (auto& [history_namespace, one] : open) finish(one);
  segments_.clear();
  num_tokens_ = 0;
  namespaces.assign(namespaces_.begin(), namespaces_.end());
  namespaces_.clear();
  return batches;
}

void Outbox::Delete(std::string_view history_namespace) {
  std::erase_if(segments_, [&](const Waiting& waiting) {
    if (!IsWithinNamespace(waiting.history_namespace, history_namespace)) return false;
    num_tokens_ -= waiting.segment.text.tokens.size();
    return true;
  });
}

ForeignText* ForeignTexts::Find(const Key& key) {
  if (auto found = recent_.find(key); found != recent_.end()) return &found->second;
  auto found = older_.find(key);
  if (found == older_.end()) return nullptr;
  ForeignText text = std::move(found->second);
  older_.erase(found);
  return &Insert(key, std::move(text));
}

ForeignText& ForeignTexts::Insert(const Key& key, ForeignText text) {
  if (recent_.size() >= kMaxTexts) {
    older_ = std::move(recent_);
    recent_.clear();
  }
  return recent_.insert_or_assign(key, std::move(text)).first->second;
}

void ForeignTexts::Erase(const Key& key) {
  recent_.erase(key);
  older_.erase(key);
}

}  // namespace agentspec
