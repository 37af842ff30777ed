// The draft engine of one model: tracker -> history -> drafter -> budget, one call for the whole batch.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "archive.h"
#include "block_feed.h"
#include "block_tracker.h"
#include "budget_planner.h"
#include "drafter.h"
#include "grammar.h"
#include "history.h"
#include "history_table.h"
#include "request.h"
#include "types.h"

namespace agentspec {

struct EngineOptions {
  int num_speculative_tokens = 16;
  HistoryTable::Limits limits;
  bool is_strict = false;
  BudgetOptions budget;
  // Parts that a benchmark switches off to learn what each is worth.
  bool has_own = true;           // a request's own text votes
  bool has_block_starts = true;  // texts are marked where a block begins, so that drafts begin there too
  bool has_calibration = true;
  bool has_prior = true;  // calibration starts from what was seen on other text
  DraftWeights weights;
};

// Struct of arrays over the rows of a batch; see StepRequest in engine.py.
struct StepInput {
  std::span<const int64_t> handles;
  std::span<const int32_t> positions;
  std::span<const int32_t> token_offsets;
  std::span<const Token> token_ids;
  std::span<const int32_t> num_draft_tokens;
  std::span<const int32_t> num_accepted_tokens;
  std::span<const int32_t> max_draft_tokens;
  int64_t token_budget;
  int64_t deadline_us;  // 0: none
  int64_t num_decode_rows;
  int64_t num_prefill_tokens;
  int64_t num_context_tokens;
  int64_t client_id;
  StepShape last_step;      // that the target model has finished
  double last_duration_ms;  // NaN: not measured
};

// What is held of one stage of one namespace.
struct HistorySize {
  std::string history_namespace, stage;
  size_t num_tokens, num_bytes;
};

struct StepOutput {
  std::vector<int32_t> draft_lengths;
  std::vector<Token> draft_token_ids;
  std::vector<float> survival;
  std::vector<float> redundancy;
  std::vector<int64_t> resync_handles;
  int skip_steps = 0;  // steps to come that will not draft
};

enum class FinishReason { kStop = 0, kLength = 1, kAbort = 2, kError = 3 };

// Thread-safe: every public call holds the engine's lock, `mutex_`, and long ones let go of it in between. Lock order:
// the caller releases Python's GIL before it takes `mutex_` and takes no lock of its own within; `mutex_` comes before
// the lock of BlockPool, which is the last.
class Engine {
 public:
  Engine(std::string vocabulary_bytes, std::vector<int64_t> vocabulary_offsets, Grammar grammar, EngineOptions options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws std::invalid_argument, nothing changed: a token outside the vocabulary, max_draft_tokens outside 0..64.
  void Open(int64_t handle, std::span<const Token> prompt, const RequestOptions& options);
  // Throws std::invalid_argument, nothing changed: a wrong length, a negative count, a token outside the vocabulary.
  StepOutput Step(const StepInput& input);
  // An unknown handle is ignored. Throws std::invalid_argument, nothing changed: a token outside the vocabulary.
  void Close(int64_t handle, FinishReason reason, int64_t true_length, std::span<const Token> tail);

  void SetPolicy(Policy policy);
  Policy policy() const;
  struct ClientBudget {
    int64_t client_id;
    std::array<BudgetStats, BudgetPlanner::kNumBuckets> buckets;
    uint64_t num_timings, num_skipped_timings, num_gate_closings;
    double level_ms, noise, trust;
    bool is_gate_open;
  };
  std::vector<ClientBudget> Budgets() const;
  // What was learned of step times, as bytes; empty: nothing yet.
  std::string ExportCostModel(int64_t client_id) const;
  // False, nothing changed: the bytes are cut, changed, or of another machine.
  bool ImportCostModel(int64_t client_id, std::string_view bytes);
  // Time of a step, ms; < 0: nothing was measured yet.
  double PredictStep(int64_t client_id, const StepShape& shape) const;

  // The number of a grammar for RequestOptions; 0 is the constructor's. -1: with it, all of them would be too large.
  int AddGrammar(Grammar grammar);
  // Open requests keep it; later ones that name it take the constructor's.
  void RemoveGrammar(int id);

  // All histories of a namespace and of those within it, as bytes. Steps go on meanwhile.
  std::string Export(const std::string& history_namespace) const;
  // The histories of one namespace alone as so many archives: each has its part of every history, the oldest first.
  std::vector<std::string> ExportParts(const std::string& history_namespace, size_t num_parts) const;
  // Adds the histories of an archive; returns the number of tokens. Throws ArchiveError, nothing changed: another
  // version or vocabulary, the bytes were cut or changed, or a history is not within the namespace `outer` (empty:
  // any).
  size_t Import(std::string_view archive, std::string_view outer = {});
  // Of a namespace and of those within it, ordered by namespace and stage.
  std::vector<HistorySize> HistorySizes(const std::string& history_namespace) const;
  // From now on keeps what requests store for TakeBlocks, at most so many tokens; 0: no longer.
  void ShareBlocks(size_t max_waiting_tokens);
  // Whether TakeBlocks has something to give; waits for it as long as `timeout`.
  bool WaitForBlocks(std::chrono::microseconds timeout);
  // What was stored since the last call: blocks that were closed, and of open ones every kSharedAtOnce tokens. Also
  // tells the namespaces that requests have used since.
  std::vector<SegmentBatch> TakeBlocks(std::vector<std::string>& namespaces);
  // Adds what TakeBlocks gave on another engine with the same vocabulary; a text goes on where `origin` left it, and
  // what is here already is passed over. Returns the number of tokens. Throws ArchiveError, nothing changed: see
  // ReadSegments.
  size_t MergeBlocks(const std::string& history_namespace, std::string_view bytes, uint64_t origin);
  // Tokens that TakeBlocks could not give because too many waited.
  uint64_t NumUnsharedTokens() const;
  // Forgets all that a namespace, and those within it, ever wrote, also what its open requests go on to write. Returns
  // the number of tokens.
  size_t DeleteNamespace(const std::string& history_namespace);
  // Forgets histories that no request has used for `max_age_s` seconds; returns the number of tokens. Throws
  // std::invalid_argument: a negative age, or NaN.
  size_t ForgetUnused(double max_age_s);

  // Block path of the next output token of an open request. Throws std::invalid_argument: unknown handle.
  std::string BlockPath(int64_t handle) const;
  std::vector<BlockStats> Stats() const;
  // What a namespace's drafts were compared with; see Calibration::Counts.
  std::vector<Calibration::Count> CalibrationCounts(const std::string& history_namespace, bool is_greedy) const;
  // Of all block trackers since the engine started.
  uint64_t NumRecoveries() const;
  size_t NumOpenRequests() const;
  size_t MemoryBytes() const;
  size_t NumHistoryTokens() const;
  // Of output that was not stored since the engine started, because a workflow stored too much or there was no room.
  uint64_t NumDroppedTokens() const;
  void CheckIntegrity() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Group;  // requests whose queries are looked up together

  // Between two pieces of long work: steps that wait for the lock get it first.
  void LetStepsGoFirst(std::unique_lock<std::mutex>& lock) const;
  void CheckTokens(std::span<const Token> tokens, const char* what, int64_t handle) const;
  void CheckStep(const StepInput& input) const;
  ArchivedText ReadText(const ContextIndex& index, uint32_t page) const;
  // Calls `visit` with each text, the oldest first; lets go of the lock between two.
  template <typename Visitor>
  void VisitTexts(const History& history, std::unique_lock<std::mutex>& lock, Visitor&& visit) const;
  // Appends to a text that has come as far as `text` and ends in `chain`.
  void StoreArchived(History& history, History::Chain& chain, TextWindow& text, TextSource source,
                     const ArchivedText& archived);
  size_t MergeSegment(const std::string& history_namespace, const Segment& segment, uint64_t origin);
  // Keeps what a request has stored for other engines, which get it when a block has ended.
  void Share(Request& request, std::span<const FiledToken> tokens);
  // Leaves so many tokens of a request out.
  void Withhold(Request& request, size_t num_tokens);
  // Hands over what was kept; `is_end`: nothing follows.
  void Send(Request& request, bool is_end);
  std::shared_ptr<Calibration> FindCalibration(const RequestOptions& options);
  BlockStats* FindStats(const Request& request);
  // The request of each row; nullptr where the engine does not know it at the row's position.
  // Throws std::invalid_argument, nothing changed: a handle occurs twice.
  std::vector<Request*> FindRows(const StepInput& input);
  void TakeIn(const StepInput& input, size_t row, Request& request, BudgetPlanner& planner);
  BudgetPlanner& FindPlanner(int64_t client_id);
  NextStep Describe(const StepInput& input, std::span<Request* const> rows) const;
  int Room(const StepInput& input, size_t row, const Request& request) const;
  void PrefetchTakeIn(std::span<Request* const> rows) const;
  // `is_last`: the request ends with them, nothing is drafted any more.
  void Ingest(Request& request, std::span<const Token> tokens, bool is_last = false);
  // Files what of the request's output is not in the history yet; it can't be taken back.
  void Publish(Request& request);
  // Stores output in the history of the stage, or in one of the workflow's own when it would crowd others out.
  void StoreOutput(Request& request, std::span<const FiledToken> tokens);
  // The same, and the intake of its `tail`, piece by piece for a request that ends. False if meanwhile it has ended
  // otherwise.
  bool IngestTail(int64_t handle, std::span<const Token> tail, std::unique_lock<std::mutex>& lock);
  bool PublishEnd(int64_t handle, std::unique_lock<std::mutex>& lock);
  Request* FindClosing(int64_t handle);
  void DraftRows(const StepInput& input, std::span<Request* const> rows, float min_survival,
                 Clock::time_point deadline);
  void SplitBudget(BudgetPlanner& planner, std::span<Request* const> rows, double draft_us, StepOutput& output);
  void AddQueries(Request& request, Group& group);

  EngineOptions options_;
  Vocabulary vocabulary_;
  mutable std::mutex mutex_;
  mutable std::atomic<int> num_waiting_steps_ = 0;
  GrammarTable grammars_;
  LabelTable labels_;
  Drafter drafter_;
  std::unordered_map<int64_t, BudgetPlanner> planners_;  // by client id
  std::vector<RowDraft> row_drafts_;                     // of the step; kept for its memory
  std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;
  HistoryTable histories_;
  // By namespace, greedy or sampled; with the namespace.
  std::unordered_map<std::string, std::pair<std::string, std::shared_ptr<Calibration>>> calibrations_;
  std::unordered_map<std::string, BlockStats> stats_;
  BlockStats discarded_stats_;  // of open requests whose namespace was deleted, or that are not live
  Outbox outbox_;
  ForeignTexts foreign_texts_;
  std::condition_variable has_shared_;  // the outbox is no longer empty
  uint64_t num_recoveries_ = 0;         // of closed requests' block trackers
  uint64_t clock_ = 0;                  // counts steps and openings; orders histories by last use
  uint32_t next_writer_ = 0;
};

}  // namespace agentspec
