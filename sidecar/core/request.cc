#include "request.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace agentspec {

namespace {

uint16_t HashWorkflow(std::string_view workflow_id) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (char byte : workflow_id) hash = (hash ^ static_cast<uint8_t>(byte)) * 16777619u;
  return static_cast<uint16_t>(hash ^ hash >> 16);
}

}  // namespace

Request::Request(const Vocabulary& vocabulary, std::shared_ptr<const Grammar> output_grammar, LabelTable& labels,
                 std::span<const Token> prompt, RequestOptions request_options, uint32_t writer, bool is_strict)
    : source{writer, HashWorkflow(request_options.workflow_id)},
      text(is_strict),
      output(is_strict),
      own(is_strict),
      options(std::move(request_options)),
      grammar(std::move(output_grammar)),
      tracker(vocabulary, *grammar, labels, {options.start_block, prompt, options.is_structured, options.forced_tool}) {
}

void Request::IndexPrompt(std::span<const Token> prompt) {
  own.Reserve(prompt.size());
  std::array<FiledToken, 64> filed;
  for (size_t begin = 0; begin < prompt.size(); begin += filed.size()) {
    size_t num_tokens = std::min(filed.size(), prompt.size() - begin);
    for (size_t i = 0; i < num_tokens; ++i) {
      filed[i] = {prompt[begin + i], kPromptLabel, false, text_contexts};
      text.Push(prompt[begin + i]);
      text_contexts = text.Tags();
    }
    own.Append(std::span(filed).first(num_tokens), source, own_page);
  }
}

void Request::PushText(Token token, Label label, bool starts_block) {
  FiledToken filed{token, label, starts_block, text_contexts};
  own.Append({&filed, 1}, source, own_page);
  text.Push(token);
  text_contexts = text.Tags();
}

void Request::PushPromptTail(std::span<const Token> prompt) {
  for (Token token : prompt.last(std::min(prompt.size(), kPromptTailTokens))) PushOutput(token, kPromptTailLabel);
}

void Request::PushOutput(Token token, Label label) {
  if (is_stored() && num_logged >= num_published) pending.push_back({token, label, false, output_contexts});
  ++num_logged;
  output.Push(token);
  output_contexts = output.Tags();
}

void Request::DropAfter(int64_t true_length) {
  for (int64_t excess = num_output - true_length; excess > 0 && !pending.empty(); pending.pop_back())
    excess -= pending.back().token != kBlockStart;
  while (!pending.empty() && pending.back().token == kBlockStart) pending.pop_back();  // no block follows an end
  if (!pending.empty() && pending.back().label == kPromptTailLabel) pending.clear();   // nothing follows the prompt
}

double Request::ExpectedTokens(int64_t num_draft_tokens) const {
  double num_tokens = 0;
  for (int64_t i = 0; i < std::min<int64_t>(num_draft_tokens, draft.length); ++i)
    num_tokens += draft.tokens[static_cast<size_t>(i)].survival;
  return num_tokens;
}

void Request::CompareShadow(Token token) {
  if (shadow.length == 0) return;
  const DraftToken& expected = shadow.tokens[shadow_accepted];
  bool is_accepted = expected.token == token;
  calibration->RecordToken(expected.cell, is_accepted);
  shadow_accepted += is_accepted;
  if (is_accepted && shadow_accepted < shadow.length) return;
  calibration->RecordDraft();
  for (int depth = 0; depth < shadow.length; ++depth)
    calibration->RecordSurvival(shadow.tokens[depth].predicted, depth, depth < shadow_accepted);
  shadow.length = 0;
}

}  // namespace agentspec
