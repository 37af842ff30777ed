#include "block_tracker.h"

#include <stdexcept>

#include "archive.h"

namespace agentspec {

Label LabelTable::Child(Label parent, std::string_view name) {
  std::string key = std::to_string(parent) + "/" + std::string(name);
  if (auto found = children_.find(key); found != children_.end()) return found->second;
  if (entries_.size() == kMaxLabels) return kMaxLabels - 1;
  bool is_last = entries_.size() == kMaxLabels - 1;
  entries_.push_back(is_last ? Entry{kTop, "other"} : Entry{parent, std::string(name)});
  auto label = static_cast<Label>(entries_.size() - 1);
  if (!is_last) children_.emplace(std::move(key), label);
  return label;
}

std::string LabelTable::Path(Label label) const {
  std::string path = entries_[label].name;
  while (entries_[label].parent != kTop) {
    label = entries_[label].parent;
    path = entries_[label].name + "/" + path;
  }
  return path;
}

Label LabelTable::Find(std::string_view path) {
  Label label = kTop;
  while (!path.empty()) {
    auto name = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(path.size(), name.size() + 1));
    if (label != kTop || name != entries_[kTop].name) label = Child(label, name);
  }
  return label;
}

Vocabulary::Vocabulary(std::string bytes, std::vector<int64_t> offsets, const Grammar& grammar)
    : bytes_(std::move(bytes)), offsets_(std::move(offsets)) {
  if (offsets_.empty() || offsets_.front() != 0 || offsets_.back() != static_cast<int64_t>(bytes_.size()))
    throw std::invalid_argument("vocabulary: offsets must run from 0 to the number of bytes");
  for (size_t token = 0; token + 1 < offsets_.size(); ++token)
    if (offsets_[token] > offsets_[token + 1])
      throw std::invalid_argument("vocabulary: offset of token " + std::to_string(token) + " goes backwards");
  for (Token token = 0; token < size(); ++token) {
    bool is_inert = true;
    for (char byte : Bytes(token))
      is_inert &= grammar.Next(Grammar::kRoot, static_cast<uint8_t>(byte)) == Grammar::kRoot;
    is_inert_.push_back(is_inert);
  }
  std::string_view lengths(reinterpret_cast<const char*>(offsets_.data()), offsets_.size() * sizeof(offsets_[0]));
  fingerprint_ = Checksum(bytes_, Checksum(lengths));
}

BlockTracker::BlockTracker(const Grammar& grammar, LabelTable& labels, std::string_view start_path) {
  stack_[0] = {Grammar::kTopLevel, LabelTable::kTop};
  while (!start_path.empty()) {
    auto name = start_path.substr(0, start_path.find('/'));
    start_path.remove_prefix(std::min(start_path.size(), name.size() + 1));
    if (name.empty() || (depth_ == 0 && name == "text")) continue;
    Label child = labels.Child(label(), name);
    int rule = grammar.Find(std::string(name));
    if (rule == Grammar::kNoRule && depth_ > 0)
      stack_[depth_].label = child;
    else
      Push(rule, child);
  }
}

void BlockTracker::Push(int rule, Label label) {
  if (depth_ < kMaxDepth) stack_[++depth_] = {rule, label};
}

bool BlockTracker::Advance(const Vocabulary& vocabulary, const Grammar& grammar, LabelTable& labels, Token token) {
  if (state_ == Grammar::kRoot && vocabulary.IsInert(token)) return false;
  bool is_other_block = false;
  for (char byte : vocabulary.Bytes(token)) {
    state_ = grammar.Next(state_, static_cast<uint8_t>(byte));
    if (!grammar.HasMarker(state_)) continue;
    int top = stack_[depth_].rule;
    if (grammar.Closes(state_, top)) {
      --depth_;
      is_other_block = true;
    } else if (int rule = grammar.Opens(state_, top); rule != Grammar::kNoRule) {
      is_other_block |= depth_ < kMaxDepth;
      Push(rule, labels.Child(label(), grammar.name(rule)));
    } else {
      continue;
    }
    state_ = Grammar::kRoot;
  }
  return is_other_block;
}

}  // namespace agentspec
