// Finds the draft of one request: positions whose context matches, from its own text and from the shared history, vote
// for the next token, again and again.
#pragma once

#include <array>
#include <cstdint>

#include "calibration.h"
#include "context_index.h"
#include "types.h"

namespace agentspec {

// Weights of the vote. All in one place; from replays of agent traces (D-008).
struct DraftWeights {
  float per_matched_token = 2.0f;  // a candidate with one more matching token weighs e^2 times as much
  int max_matched_tokens = 24;     // ... up to here
  float own = 2.0f;                // text of the request itself against shared text
  float other_workflow = 0.14f;    // wide evidence: same stage, another workflow
  float other_block = 0.37f;       // another block path (soft isolation)
  float escape = 0.6f;             // weight of "something never seen here" after a match of length 0
  float support_half = 4.0f;       // candidates at which support saturates half
  int min_candidates = 4;          // fewer: the next shorter context votes too
};

struct DraftToken {
  Token token;
  float survival;          // P(it and all before it are accepted); never rises along a draft
  float predicted;         // the same before the second stage of calibration
  Calibration::Cell cell;  // kind of its evidence
};

struct Draft {
  int length = 0;
  float redundancy = 0;  // consensus of the first token x support / (support + support_half), in [0, 1]
  std::array<DraftToken, kMaxDraftTokens> tokens;
};

// The end of a text, and where a drafter looks for its continuation.
struct Query {
  const ContextIndex* index;
  const ContextTags* contexts;  // of the text's end
  const TextWindow* text;
  Label label;  // block path of the next token
  uint16_t workflow;
  uint32_t writer;
  bool is_own;  // index of the request itself
  ContextIndex::Lookup lookup{};
};

class Drafter {
 public:
  Drafter(DraftWeights weights, bool is_strict);

  // Drafting runs in phases over a group of queries, so that their memory reads overlap: Prefetch all, Find all,
  // PrefetchText all, then Gather those of one request and Vote.
  static void Prefetch(const Query& query) { query.index->PrefetchSlots(*query.contexts); }
  static void Find(Query& query) { query.lookup = query.index->Find(*query.contexts); }
  static void PrefetchText(const Query& query) { query.index->PrefetchText(query.lookup); }
  void Clear() { num_candidates_ = 0; }
  void Gather(const Query& query);
  // Drafts at most `max_length` tokens from the candidates gathered since Clear; the draft ends where it would survive
  // with less than `min_survival`.
  void Vote(int max_length, float min_survival, const Calibration& calibration, Draft& draft);

 private:
  struct Candidate {
    Token next;  // its continuation; a candidate without one is removed
    float weight;
    const ContextIndex::Page* page;
    const ContextIndex* index;
    uint8_t offset, fill;  // of the continuation in its page
    uint8_t match_length;
    bool is_own;
    Label label;  // of the continuation's first token
  };
  static constexpr int kMaxCandidates = 96;  // of five indexes

  void Add(const Query& query, Position position);
  // To the next token past block starts; false when there is none.
  bool Advance(Candidate& candidate) const;
  struct Winner {
    Token token;
    float weight;
    int support;  // candidates that continue with the token
    int match_length;
    bool is_own, is_shared;

    static Winner Of(const Candidate& candidate);
    void Add(const Candidate& candidate);
  };
  // The token with most weight among the candidates, of which there is one; `total`: the weight of all.
  Winner Poll(float& total) const;
  // Leaves the candidates that continue with `token`, each at its next token.
  void Follow(Token token);

  DraftWeights weights_;
  bool is_strict_;
  std::array<float, kMaxContext + 1> match_weight_;
  std::array<Candidate, kMaxCandidates> candidates_;
  int num_candidates_ = 0;
};

}  // namespace agentspec
