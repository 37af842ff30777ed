#include "block_tracker.h"

#include <algorithm>
#include <stdexcept>

#include "archive.h"

namespace agentspec {

namespace {

constexpr std::string_view kWhitespace = " \t\r\n";
constexpr std::string_view kToolCall = "tool_call";

// What may stand in a tool's name; any other byte ends it.
bool IsNameByte(uint8_t byte) {
  return (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z') || byte == '_' ||
         byte == '.' || byte == '-';
}

}  // namespace

std::string LabelTable::Key(Label parent, std::string_view name) {
  return std::to_string(parent) + "/" + std::string(name);
}

Label LabelTable::Child(Label parent, std::string_view name) {
  std::string key = Key(parent, name);
  if (auto found = children_.find(key); found != children_.end()) return found->second;
  if (entries_.size() == kMaxLabels) return kMaxLabels - 1;
  bool is_last = entries_.size() == kMaxLabels - 1;
  entries_.push_back(is_last ? Entry{kTop, "other"} : Entry{parent, std::string(name)});
  auto label = static_cast<Label>(entries_.size() - 1);
  if (!is_last) children_.emplace(std::move(key), label);
  return label;
}

Label LabelTable::Tool(Label parent, std::string_view name) {
  if (auto found = children_.find(Key(parent, name)); found != children_.end()) return found->second;
  if (entries_[parent].num_tools == kMaxToolsPerLabel) return Child(parent, "other");
  ++entries_[parent].num_tools;
  return Child(parent, name);
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

Vocabulary::Vocabulary(std::string bytes, std::vector<int64_t> offsets)
    : bytes_(std::move(bytes)), offsets_(std::move(offsets)) {
  if (offsets_.empty() || offsets_.front() != 0 || offsets_.back() != static_cast<int64_t>(bytes_.size()))
    throw std::invalid_argument("vocabulary: offsets must run from 0 to the number of bytes");
  for (size_t token = 0; token + 1 < offsets_.size(); ++token)
    if (offsets_[token] > offsets_[token + 1])
      throw std::invalid_argument("vocabulary: offset of token " + std::to_string(token) + " goes backwards");
  byte_bits_.reserve(static_cast<size_t>(size()));
  for (Token token = 0; token < size(); ++token) {
    uint64_t& bits = byte_bits_.emplace_back(0);
    for (char byte : Bytes(token)) bits |= ByteBit(static_cast<uint8_t>(byte));
  }
  std::string_view lengths(reinterpret_cast<const char*>(offsets_.data()), offsets_.size() * sizeof(offsets_[0]));
  fingerprint_ = Checksum(bytes_, Checksum(lengths));
}

std::string Vocabulary::Tail(std::span<const Token> tokens, size_t num_bytes) const {
  size_t first = tokens.size(), length = 0;
  while (first > 0 && length < num_bytes) length += Bytes(tokens[--first]).size();
  std::string tail;
  tail.reserve(length);
  for (Token token : tokens.subspan(first)) tail += Bytes(token);
  tail.erase(0, tail.size() - std::min(tail.size(), num_bytes));
  return tail;
}

BlockTracker::BlockTracker(const Vocabulary& vocabulary, const Grammar& grammar, LabelTable& labels,
                           const BlockStart& start)
    : state_(grammar.AtOutputStart()) {
  stack_[0] = {Grammar::kTopLevel, LabelTable::kTop};
  if (start.path.empty())
    ReadPrompt(vocabulary.Tail(start.prompt, kMaxPromptBytes), grammar, labels);
  else
    EnterPath(start.path, grammar, labels);
  num_recoveries_ = 0;  // they count for the output alone
  bool is_known = !start.path.empty() || depth_ > 0;
  if (is_known || (!start.is_structured && start.tool.empty())) return;
  // No marker ends bare JSON; a block before or after it interrupts it.
  Label label = labels.Child(LabelTable::kTop, kToolCall);
  stack_[0].label = start.tool.empty() ? label : labels.Tool(label, start.tool);
}

void BlockTracker::EnterPath(std::string_view path, const Grammar& grammar, LabelTable& labels) {
  while (!path.empty()) {
    auto name = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(path.size(), name.size() + 1));
    if (name.empty() || (depth_ == 0 && name == "text")) continue;
    int rule = grammar.Find(name);
    if (rule == Grammar::kNoRule && depth_ > 0)
      stack_[depth_].label = labels.Tool(label(), name);
    else
      Push(rule, rule == Grammar::kNoRule ? labels.Tool(label(), name) : labels.Child(label(), name));
  }
}

void BlockTracker::ReadPrompt(std::string_view tail, const Grammar& grammar, LabelTable& labels) {
  size_t answer = std::string_view::npos;
  for (const auto& start : grammar.answer_starts()) {
    size_t found = tail.rfind(start);
    if (found == std::string_view::npos) continue;
    found += start.size();
    if (answer == std::string_view::npos || found > answer) answer = found;
  }
  bool is_found = answer != std::string_view::npos;
  if (!is_found) {  // of a template that we do not know, or none: its last line
    size_t last = tail.find_last_not_of(kWhitespace);
    size_t line_end = last == std::string_view::npos ? last : tail.rfind('\n', last);
    answer = line_end == std::string_view::npos ? 0 : line_end + 1;
  }
  std::string_view prefill = tail.substr(answer);
  if (prefill.find_first_not_of(kWhitespace) == std::string_view::npos) return;
  Read(prefill, grammar, labels);
  bool is_certain = is_found || std::none_of(stack_.begin(), stack_.begin() + depth_ + 1,
                                             [&](const Frame& frame) { return grammar.IsToggle(frame.rule); });
  if (!is_certain) Close(1, grammar);
}

void BlockTracker::Push(int rule, Label label) {
  if (depth_ == kMaxDepth) {
    ++num_recoveries_;
    return;
  }
  stack_[++depth_] = {rule, label};
  has_changed_ = true;
}

bool BlockTracker::Read(std::string_view bytes, const Grammar& grammar, LabelTable& labels) {
  has_changed_ = false;
  for (char character : bytes) {
    auto byte = static_cast<uint8_t>(character);
    state_ = grammar.Next(state_, byte);
    const auto* event = grammar.Found(state_);
    if (event != nullptr && TakeMarkers(*event, grammar, labels))
      state_ = grammar.After(byte);
    else if (name_bytes_left_ > 0)
      ReadName(byte, grammar, labels);
  }
  return has_changed_;
}

bool BlockTracker::TakeMarkers(const Grammar::Event& event, const Grammar& grammar, LabelTable& labels) {
  bool is_reachable = true;  // all blocks further in are open-ended, so that another may take their place
  for (int depth = depth_; depth >= 0; --depth) {
    int holder = stack_[depth].rule;
    if (event.Ends(holder)) {
      Close(depth, grammar);
      return true;
    }
    int rule = is_reachable ? grammar.Opens(event, holder) : Grammar::kNoRule;
    if (rule != Grammar::kNoRule) {
      bool is_next_of_its_kind = grammar.IsOpenEnded(holder) && grammar.name(rule) == grammar.name(holder);
      Open(rule, is_next_of_its_kind ? depth - 1 : depth, grammar, labels);
      return true;
    }
    is_reachable &= grammar.IsOpenEnded(holder);
  }
  num_recoveries_ += event.ends != 0;
  return false;
}

void BlockTracker::Close(int depth, const Grammar& grammar) {
  for (int inner = depth + 1; inner <= depth_; ++inner) num_recoveries_ += !grammar.IsOpenEnded(stack_[inner].rule);
  depth_ = depth - 1;
  name_bytes_left_ = 0;
  has_changed_ = true;
}

void BlockTracker::Open(int rule, int depth, const Grammar& grammar, LabelTable& labels) {
  has_changed_ |= depth < depth_;
  depth_ = depth;
  name_bytes_left_ = 0;
  if (grammar.IsText(rule)) return;
  Label parent = label();
  bool is_bare_json = depth == 0 && parent != LabelTable::kTop;
  if (is_bare_json && !grammar.MayStandIn(rule, std::max(grammar.Find(kToolCall), Grammar::kTopLevel)))
    parent = LabelTable::kTop;
  Push(rule, labels.Child(parent, grammar.name(rule)));
  if (depth_ == depth || !grammar.HasName(rule)) return;
  name_bytes_left_ = kMaxNameOffset;
  name_state_ = Grammar::kRoot;
  is_in_name_ = grammar.StartsWithName(rule);
  name_length_ = 0;
}

void BlockTracker::ReadName(uint8_t byte, const Grammar& grammar, LabelTable& labels) {
  --name_bytes_left_;
  if (is_in_name_ && IsNameByte(byte)) {
    if (name_length_ == kMaxNameBytes) {
      name_bytes_left_ = 0;
      return;
    }
    name_[name_length_++] = static_cast<char>(byte);
  } else if (is_in_name_) {
    std::string_view name(name_.data(), name_length_);
    is_in_name_ = false;
    if (!name.empty() && name != "function") {  // the type of a call in many formats, not the name of a tool
      stack_[depth_].label = labels.Tool(label(), name);
      has_changed_ = true;
      name_bytes_left_ = 0;
      return;
    }
  }
  name_state_ = grammar.NextName(name_state_, byte);
  if (grammar.StartsName(name_state_, stack_[depth_].rule)) {
    is_in_name_ = true;
    name_length_ = 0;
  }
}

}  // namespace agentspec
