// One open request: what it has written, where that ends in the indexes, and its drafts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "block_tracker.h"
#include "calibration.h"
#include "drafter.h"
#include "grammar.h"
#include "history.h"
#include "types.h"

namespace agentspec {

// What is known of a request when it opens.
struct RequestOptions {
  std::string history_namespace;  // a wall: nothing is shared across it
  std::string workflow_id;
  std::string stage;
  int grammar_id = 0;          // see AddGrammar
  std::string start_block;     // block path at the first output token; empty: read from prompt and request
  bool is_structured = false;  // the output is bare JSON
  std::string forced_tool;     // the tool that the output must call; empty: none
  int max_draft_tokens = kMaxDraftTokens;
  bool is_recorded = true;  // its output enters the history
  bool is_reader = true;    // it drafts from the history
  bool is_greedy = true;    // the target model samples at temperature 0
  bool is_live = true;      // an engine writes it now: it is counted, and what it may store is rationed
};

struct BlockStats {
  std::string history_namespace, workflow_id, stage, block;
  int64_t num_steps = 0;
  int64_t num_drafts = 0;
  int64_t num_draft_tokens = 0;
  int64_t num_accepted_tokens = 0;
  int64_t num_tokens = 0;

  // One step of one request.
  void Count(int64_t draft_tokens, int64_t accepted_tokens, size_t tokens) {
    num_steps += 1;
    num_drafts += draft_tokens > 0;
    num_draft_tokens += draft_tokens;
    num_accepted_tokens += accepted_tokens;
    num_tokens += static_cast<int64_t>(tokens);
  }
};

// What a request has stored and not yet handed to other engines.
struct Outgoing {
  uint32_t offset = 0;  // tokens and block starts that were handed over
  std::vector<Token> prompt_tail;
  std::vector<Token> tokens;
  std::vector<Label> labels;  // of the first token, then of each kBlockStart, as in ArchivedText
};

struct Request {
  Request(const Vocabulary& vocabulary, std::shared_ptr<const Grammar> output_grammar, LabelTable& labels,
          std::span<const Token> prompt, RequestOptions request_options, uint32_t writer, bool is_strict);

  // Makes the prompt's end text of the request.
  void IndexPrompt(std::span<const Token> prompt);
  // The next output token, in the request's own index and in its output.
  void PushText(Token token, Label label, bool starts_block);
  void PushOutput(Token token) { PushOutput(token, tracker.label()); }
  // The output's first contexts reach back into the prompt.
  void PushPromptTail(std::span<const Token> prompt);
  void StartBlock(bool is_marked) {
    starts_block = true;
    if (is_marked) PushOutput(kBlockStart);
  }
  // Drops output that was handed over past its true length: it was provisional, so it has not been published yet.
  void DropAfter(int64_t true_length);
  // It neither reads nor writes any any more.
  void LeaveHistories() {
    history.reset();
    private_history.reset();
  }
  // Learns from the shadow draft what the next output token says of it.
  void CompareShadow(Token token);
  // Of the first tokens of its draft, as survival promises.
  double ExpectedTokens(int64_t num_draft_tokens) const;
  bool is_stored() const { return history != nullptr && options.is_recorded; }
  // Where its output goes; nullptr: there was no room.
  History* target() const { return is_diverted ? private_history.get() : history.get(); }
  void PushOutput(Token token, Label label);

  // What every step reads comes first.
  uint64_t last_step = 0;                    // clock of the engine at its last step
  int64_t num_output = 0;                    // output tokens taken in
  int64_t num_logged = 0;                    // the same with the prompt's tail and block starts
  int64_t num_published = 0;                 // of them, those that entered the history; stays through a resync
  std::shared_ptr<History> history;          // of its stage
  std::shared_ptr<History> private_history;  // of its stage, its workflow's alone; mostly there is none
  bool is_diverted = false;                  // it writes the latter
  History::Chain chain;                      // in the one that it writes
  TextSource source;
  uint32_t own_page = ContextIndex::kNoPage;
  bool is_discarded = false;        // its namespace was deleted since it opened: it stores and counts nothing any more
  bool starts_block = false;        // the next output token does
  bool is_closing = false;          // another thread is storing its end
  BlockStats* stats = nullptr;      // row of the current block
  std::vector<FiledToken> pending;  // after the prompt's tail, kBlockStart at each block's start; not yet stored
  TextWindow text;                  // the prompt's end and the output
  ContextTags text_contexts;        // at its end
  TextWindow output;                // with block starts
  ContextTags output_contexts;
  ContextIndex own;       // of the prompt's end and the output
  int64_t client_id = 0;  // who stepped it last
  RequestOptions options;
  std::shared_ptr<const Grammar> grammar;
  BlockTracker tracker;
  std::shared_ptr<Calibration> calibration;
  Outgoing outgoing;
  int shadow_accepted = 0;  // tokens of the shadow that were right so far
  Draft shadow;             // a draft that is being compared with what the request goes on to write
  Draft draft;              // the last one
};

}  // namespace agentspec
