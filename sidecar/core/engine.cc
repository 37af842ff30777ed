#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <utility>

namespace agentspec {

namespace {

constexpr size_t kGroupSize = 16;                                // requests whose memory reads overlap
constexpr size_t kMaxPromptTokens = 8192;                        // the last tokens of a prompt that are indexed
constexpr size_t kTokensAtOnce = 256;                            // between two looks at the quota, and at waiting steps
constexpr auto kLongestCourtesy = std::chrono::milliseconds(1);  // for which long work stands back behind steps
constexpr size_t kMaxStatsRows = 1024;
constexpr size_t kMaxCalibrations = 1024;          // more namespaces than that: all start anew
constexpr int64_t kMaxDeadlineUs = 3'600'000'000;  // an hour: far from overflow

[[noreturn]] void Refuse(const std::string& what) { throw std::invalid_argument(what); }

}  // namespace

struct Engine::Group {
  struct Member {
    Request* request;
    size_t first_query, num_queries;
  };
  std::array<Member, kGroupSize> members;
  size_t num_members = 0;
  std::array<Query, kGroupSize * 5> queries;  // own, two generations of a shared and of a private history
  size_t num_queries = 0;
};

Engine::Engine(std::string vocabulary_bytes, std::vector<int64_t> vocabulary_offsets, Grammar grammar,
               EngineOptions options)
    : options_(options),
      vocabulary_(std::move(vocabulary_bytes), std::move(vocabulary_offsets)),
      grammars_(std::move(grammar)),
      drafter_(options.weights, options.is_strict),
      histories_(options.limits, options.is_strict) {
  if (vocabulary_.size() > kMaxVocabulary)
    Refuse("vocabulary: expected at most " + std::to_string(kMaxVocabulary) + " tokens, got " +
           std::to_string(vocabulary_.size()));
}

void Engine::CheckTokens(std::span<const Token> tokens, const char* what, int64_t handle) const {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocabulary_.size())
      Refuse(std::string(what) + "[" + std::to_string(i) + "]: token id " + std::to_string(tokens[i]) +
             " is outside the vocabulary of " + std::to_string(vocabulary_.size()) +
             (handle >= 0 ? " (handle " + std::to_string(handle) + ")" : ""));
}

void Engine::Open(int64_t handle, std::span<const Token> prompt, const RequestOptions& options) {
  CheckTokens(prompt, "tokens", handle);
  if (options.max_draft_tokens < 0 || options.max_draft_tokens > kMaxDraftTokens)
    Refuse("max_draft_tokens: expected 0 to 64, got " + std::to_string(options.max_draft_tokens));
  std::unique_lock lock(mutex_);
  auto request = std::make_unique<Request>(vocabulary_, grammars_.Find(options.grammar_id), labels_, prompt, options,
                                           next_writer_++, options_.is_strict);
  lock.unlock();  // nobody else knows the request yet, and a long prompt must not hold up a step
  request->IndexPrompt(prompt.last(std::min(prompt.size(), kMaxPromptTokens)));
  lock.lock();
  ++clock_;
  histories_.Tick(clock_, Clock::now());
  if (options.is_reader) {
    request->history = histories_.Find(options.history_namespace, options.stage);
    request->private_history =
        histories_.FindExisting(options.history_namespace, options.stage, request->source.workflow);
  }
  request->calibration = FindCalibration(options);
  if (outbox_.is_open() && options.is_reader) {
    bool was_empty = outbox_.is_empty();
    outbox_.Use(options.history_namespace);
    if (was_empty) has_shared_.notify_one();
  }
  auto& slot = requests_[handle];
  if (slot && slot->is_discarded && slot->options.history_namespace == options.history_namespace) {
    request->is_discarded = true;
    request->LeaveHistories();
  }
  request->stats = FindStats(*request);
  // A resync hands the same output over once more. Under another history it is another request: there, the pages of its
  // chain are those of others.
  if (slot && slot->history == request->history) {
    request->num_published = slot->num_published;
    request->chain = slot->chain;
    request->source = slot->source;
    request->is_diverted = slot->is_diverted;
    if (slot->private_history) request->private_history = slot->private_history;
    request->outgoing = slot->outgoing;
  }
  if (!options_.is_strict) request->PushPromptTail(prompt);
  request->StartBlock(options_.has_block_starts);
  slot.swap(request);
  if (request) request->LeaveHistories();
  lock.unlock();  // the request before it is taken down without it
}

std::shared_ptr<Calibration> Engine::FindCalibration(const RequestOptions& options) {
  std::string key = JoinNames({options.history_namespace, options.is_greedy ? "greedy" : "sampled"});
  if (calibrations_.size() >= kMaxCalibrations && !calibrations_.contains(key)) calibrations_.clear();
  auto& [history_namespace, calibration] = calibrations_[key];
  if (!calibration) {
    history_namespace = options.history_namespace;
    calibration = std::make_shared<Calibration>(options_.has_calibration && options_.has_prior);
  }
  return calibration;
}

BlockStats* Engine::FindStats(const Request& request) {
  if (request.is_discarded || !request.options.is_live) return &discarded_stats_;
  const RequestOptions& options = request.options;
  std::string block = labels_.Path(request.tracker.label());
  std::string key = JoinNames({options.history_namespace, options.workflow_id, options.stage, block});
  if (auto found = stats_.find(key); found != stats_.end()) return &found->second;
  if (stats_.size() + 1 >= kMaxStatsRows) return &stats_.try_emplace("", BlockStats{"", "", "", "other"}).first->second;
  BlockStats row{options.history_namespace, options.workflow_id, options.stage, block};
  return &stats_.emplace(std::move(key), std::move(row)).first->second;
}

void Engine::CheckStep(const StepInput& input) const {
  size_t num_rows = input.handles.size();
  auto check_length = [&](const char* name, size_t length, size_t expected) {
    if (length != expected)
      Refuse(std::string(name) + ": expected " + std::to_string(expected) + " entries, got " + std::to_string(length));
  };
  auto check_counts = [&](const char* name, std::span<const int32_t> counts) {
    check_length(name, counts.size(), num_rows);
    for (size_t row = 0; row < num_rows; ++row)
      if (counts[row] < 0)
        Refuse(std::string(name) + "[" + std::to_string(row) + "]: expected >= 0, got " + std::to_string(counts[row]));
  };
  check_counts("positions", input.positions);
  check_counts("num_draft_tokens", input.num_draft_tokens);
  check_counts("num_accepted_tokens", input.num_accepted_tokens);
  check_counts("max_draft_tokens", input.max_draft_tokens);
  check_length("token_offsets", input.token_offsets.size(), num_rows + 1);
  for (size_t row = 0; row < num_rows; ++row)
    if (input.token_offsets[row] > input.token_offsets[row + 1])
      Refuse("token_offsets[" + std::to_string(row + 1) + "]: goes backwards");
  if (input.token_offsets.front() != 0 || static_cast<size_t>(input.token_offsets.back()) != input.token_ids.size())
    Refuse("token_offsets: must run from 0 to the number of token_ids, " + std::to_string(input.token_ids.size()));
  if (input.deadline_us < 0) Refuse("deadline_us: expected >= 0, got " + std::to_string(input.deadline_us));
  for (auto [name, value] : {std::pair{"token_budget", input.token_budget},
                             {"num_decode_rows", input.num_decode_rows},
                             {"num_prefill_tokens", input.num_prefill_tokens},
                             {"num_context_tokens", input.num_context_tokens}})
    if (value < 0) Refuse(std::string(name) + ": expected >= 0, got " + std::to_string(value));
  CheckTokens(input.token_ids, "token_ids", -1);
}

std::vector<Request*> Engine::FindRows(const StepInput& input) {
  std::vector<Request*> rows(input.handles.size());
  for (size_t row = 0; row < rows.size(); ++row) {
    auto found = requests_.find(input.handles[row]);
    if (found == requests_.end()) continue;
    Request& request = *found->second;
    if (request.last_step == clock_)
      Refuse("handles[" + std::to_string(row) + "]: " + std::to_string(input.handles[row]) + " occurs twice");
    request.last_step = clock_;
    if (request.num_output == input.positions[row] && !request.is_closing) rows[row] = &request;
  }
  return rows;
}

StepOutput Engine::Step(const StepInput& input) {
  auto now = Clock::now();
  auto deadline = now + std::chrono::microseconds(std::min(input.deadline_us, kMaxDeadlineUs));
  CheckStep(input);
  size_t num_rows = input.handles.size();
  StepOutput output;
  output.draft_lengths.resize(num_rows);
  output.redundancy.resize(num_rows);

  ++num_waiting_steps_;
  std::lock_guard lock(mutex_);
  --num_waiting_steps_;
  ++clock_;
  histories_.Tick(clock_, now);
  std::vector<Request*> rows = FindRows(input);
  BudgetPlanner& planner = FindPlanner(input.client_id);
  for (size_t begin = 0; begin < num_rows; begin += kGroupSize) {
    size_t end = std::min(begin + kGroupSize, num_rows);
    PrefetchTakeIn(std::span(rows).subspan(begin, end - begin));
    for (size_t row = begin; row < end; ++row) {
      if (rows[row] != nullptr)
        TakeIn(input, row, *rows[row], planner);
      else
        output.resync_handles.push_back(input.handles[row]);
    }
  }
  histories_.ForgetOldest();
  if (!std::isnan(input.last_duration_ms)) planner.Finish(input.last_step, input.last_duration_ms);
  auto plan = planner.Begin(Describe(input, rows));
  if (plan.is_drafting) {
    auto begin = Clock::now();
    DraftRows(input, rows, plan.min_survival, deadline);
    std::chrono::duration<double, std::micro> draft_time = Clock::now() - begin;
    SplitBudget(planner, rows, draft_time.count(), output);
  }
  output.skip_steps = planner.skip_steps();
  return output;
}

int Engine::Room(const StepInput& input, size_t row, const Request& request) const {
  return std::min({options_.num_speculative_tokens, request.options.max_draft_tokens,
                   static_cast<int>(input.max_draft_tokens[row])});
}

NextStep Engine::Describe(const StepInput& input, std::span<Request* const> rows) const {
  NextStep next{std::max(input.num_decode_rows, static_cast<int64_t>(rows.size())),
                input.num_prefill_tokens,
                0,
                input.num_context_tokens,
                0,
                input.token_budget};
  for (size_t row = 0; row < rows.size(); ++row) {
    if (rows[row] == nullptr) continue;
    next.num_sampled_rows += !rows[row]->options.is_greedy;
    next.num_drafting_rows += Room(input, row, *rows[row]) > 0;
  }
  return next;
}

void Engine::SplitBudget(BudgetPlanner& planner, std::span<Request* const> rows, double draft_us, StepOutput& output) {
  row_drafts_.assign(rows.size(), {});
  for (size_t row = 0; row < rows.size(); ++row) {
    if (rows[row] == nullptr) continue;
    const Draft& draft = rows[row]->draft;
    row_drafts_[row] = {&draft.tokens[0].survival, draft.length, draft.redundancy, rows[row]->calibration->Maturity(),
                        sizeof(draft.tokens[0]) / sizeof(float)};
    output.redundancy[row] = draft.redundancy;
  }
  planner.Allocate(row_drafts_, draft_us, output.draft_lengths);
  for (size_t row = 0; row < rows.size(); ++row) {
    if (rows[row] == nullptr) continue;
    Draft& draft = rows[row]->draft;
    draft.length = output.draft_lengths[row];
    for (const DraftToken& token : std::span(draft.tokens).first(static_cast<size_t>(draft.length))) {
      output.draft_token_ids.push_back(token.token);
      output.survival.push_back(token.survival);
    }
  }
}

void Engine::TakeIn(const StepInput& input, size_t row, Request& request, BudgetPlanner& planner) {
  auto begin = static_cast<size_t>(input.token_offsets[row]);
  size_t num_tokens = static_cast<size_t>(input.token_offsets[row + 1]) - begin;
  Publish(request);
  int32_t num_draft_tokens = input.num_draft_tokens[row];
  if (num_tokens > 0) {
    request.stats->Count(num_draft_tokens, input.num_accepted_tokens[row], num_tokens);
    planner.AddVerdict(request.ExpectedTokens(num_draft_tokens), num_draft_tokens, input.num_accepted_tokens[row]);
  }
  Ingest(request, input.token_ids.subspan(begin, num_tokens));
  request.draft.length = 0;
  request.draft.redundancy = 0;
  request.client_id = input.client_id;
}

void Engine::PrefetchTakeIn(std::span<Request* const> rows) const {
  auto for_each = [&](auto prefetch) {
    for (const Request* request : rows)
      if (request != nullptr) prefetch(*request);
  };
  for_each([](const Request& request) {
    request.own.PrefetchSlots(request.text_contexts);
    if (!request.is_stored() || request.target() == nullptr) return;
    const ContextIndex* index = request.target()->current();
    for (const FiledToken& filed : request.pending) index->PrefetchSlots(filed.contexts);
  });
  for_each([](const Request& request) {
    request.own.PrefetchPage(request.own_page);
    request.own.Find(request.text_contexts);
    if (!request.is_stored() || request.target() == nullptr) return;
    request.target()->PrefetchEnd(request.chain);
    const ContextIndex* index = request.target()->current();
    for (const FiledToken& filed : request.pending) index->Find(filed.contexts);
  });
}

void Engine::Ingest(Request& request, std::span<const Token> tokens, bool is_last) {
  for (Token token : tokens) {
    request.CompareShadow(token);
    bool starts_block = std::exchange(request.starts_block, false);
    if (!is_last) request.PushText(token, request.tracker.label(), starts_block);
    request.PushOutput(token);
    if (request.tracker.Advance(vocabulary_, *request.grammar, labels_, token)) {
      request.StartBlock(options_.has_block_starts);
      request.stats = FindStats(request);
    }
  }
  request.num_output += static_cast<int64_t>(tokens.size());
}

void Engine::Publish(Request& request) {
  if (request.pending.empty() || !request.is_stored()) return;
  StoreOutput(request, request.pending);
  request.pending.clear();
}

void Engine::DraftRows(const StepInput& input, std::span<Request* const> rows, float min_survival,
                       Clock::time_point deadline) {
  for (size_t row = 0; row < rows.size();) {
    if (input.deadline_us > 0 && row > 0 && Clock::now() > deadline) return;
    Group group;
    std::array<int, kGroupSize> room;
    for (; row < rows.size() && group.num_members < kGroupSize; ++row) {
      if (rows[row] == nullptr) continue;
      int length = Room(input, row, *rows[row]);
      if (length == 0) continue;
      room[group.num_members] = length;
      AddQueries(*rows[row], group);
    }
    for (size_t i = 0; i < group.num_queries; ++i) Drafter::Prefetch(group.queries[i]);
    for (size_t i = 0; i < group.num_queries; ++i) Drafter::Find(group.queries[i]);
    for (size_t i = 0; i < group.num_queries; ++i) Drafter::PrefetchText(group.queries[i]);
    for (size_t i = 0; i < group.num_members; ++i) {
      const auto& member = group.members[i];
      drafter_.Clear();
      for (size_t j = 0; j < member.num_queries; ++j) drafter_.Gather(group.queries[member.first_query + j]);
      Request& request = *member.request;
      drafter_.Vote(room[i], min_survival, *request.calibration, request.draft);
      if (options_.has_calibration && request.shadow.length == 0) {
        request.shadow.length = request.draft.length;
        std::copy_n(request.draft.tokens.begin(), request.draft.length, request.shadow.tokens.begin());
        request.shadow_accepted = 0;
      }
    }
  }
}

void Engine::AddQueries(Request& request, Group& group) {
  auto& member = group.members[group.num_members++];
  member = {&request, group.num_queries, 0};
  Label label = request.tracker.label();
  auto add = [&](const ContextIndex* index, const ContextTags& contexts, const TextWindow& text, bool is_own) {
    group.queries[group.num_queries++] = {
        index, &contexts, &text, label, request.source.workflow, request.source.writer, is_own};
    ++member.num_queries;
  };
  if (options_.has_own) add(&request.own, request.text_contexts, request.text, true);
  for (History* history : {request.history.get(), request.private_history.get()}) {
    if (history == nullptr) continue;
    history->last_used = clock_;
    add(history->current(), request.output_contexts, request.output, false);
    if (history->previous()) add(history->previous(), request.output_contexts, request.output, false);
  }
}

void Engine::Close(int64_t handle, FinishReason reason, int64_t true_length, std::span<const Token> tail) {
  if (true_length < 0) Refuse("true_length: expected >= 0, got " + std::to_string(true_length));
  CheckTokens(tail, "tail", handle);
  std::unique_lock lock(mutex_);
  histories_.Tick(++clock_, Clock::now());
  auto found = requests_.find(handle);
  if (found == requests_.end() || found->second->is_closing) return;
  Request& request = *found->second;
  request.is_closing = true;
  // Tokens before the tail are missing, as after a resync that no step followed.
  if (true_length > request.num_output + static_cast<int64_t>(tail.size())) tail = {};
  if (!tail.empty()) {
    // The last step's verdict: what of the last draft the output went along with.
    auto draft = std::span(request.draft.tokens).first(static_cast<size_t>(request.draft.length));
    auto agree = [](const DraftToken& drafted, Token token) { return drafted.token == token; };
    auto num_accepted =
        std::mismatch(draft.begin(), draft.end(), tail.begin(), tail.end(), agree).first - draft.begin();
    request.stats->Count(request.draft.length, num_accepted, tail.size());
    if (request.options.is_live)
      FindPlanner(request.client_id)
          .AddVerdict(request.ExpectedTokens(request.draft.length), request.draft.length, num_accepted);
    if (!IngestTail(handle, tail, lock)) return;
  }
  request.DropAfter(true_length);
  if (reason != FinishReason::kError && !PublishEnd(handle, lock)) return;
  if (request.is_stored()) Send(request, true);
  num_recoveries_ += request.tracker.num_recoveries();
  for (History* history : {request.history.get(), request.target()}) {
    if (history == nullptr) continue;
    history->last_used = clock_;
    history->last_used_at = Clock::now();
  }
  request.LeaveHistories();
  auto ended = requests_.extract(handle);
  histories_.ForgetOldest();
  lock.unlock();  // the request is taken down without it
}

Request* Engine::FindClosing(int64_t handle) {
  auto found = requests_.find(handle);
  return found != requests_.end() && found->second->is_closing ? found->second.get() : nullptr;
}

bool Engine::IngestTail(int64_t handle, std::span<const Token> tail, std::unique_lock<std::mutex>& lock) {
  const Request* request = FindClosing(handle);
  while (true) {
    auto some = tail.first(std::min(tail.size(), kTokensAtOnce));
    Ingest(*requests_.at(handle), some, true);
    tail = tail.subspan(some.size());
    if (tail.empty()) return true;
    LetStepsGoFirst(lock);
    if (FindClosing(handle) != request) return false;
  }
}

bool Engine::PublishEnd(int64_t handle, std::unique_lock<std::mutex>& lock) {
  Request* request = FindClosing(handle);
  for (size_t begin = 0; begin < request->pending.size() && request->is_stored(); begin += kTokensAtOnce) {
    if (begin > 0) {
      histories_.ForgetOldest();
      LetStepsGoFirst(lock);
      if (FindClosing(handle) != request) return false;
      if (!request->is_stored()) break;  // its namespace was deleted
    }
    auto rest = std::span(request->pending).subspan(begin);
    auto some = rest.first(std::min(rest.size(), kTokensAtOnce));
    StoreOutput(*request, some);
  }
  return true;
}

void Engine::LetStepsGoFirst(std::unique_lock<std::mutex>& lock) const {
  if (num_waiting_steps_ == 0) return;
  lock.unlock();
  auto deadline = Clock::now() + kLongestCourtesy;
  while (num_waiting_steps_ > 0 && Clock::now() < deadline) std::this_thread::yield();
  lock.lock();
}

int Engine::AddGrammar(Grammar grammar) {
  std::lock_guard lock(mutex_);
  return grammars_.Add(std::move(grammar));
}

void Engine::RemoveGrammar(int id) {
  std::lock_guard lock(mutex_);
  grammars_.Remove(id);
}

std::vector<Calibration::Count> Engine::CalibrationCounts(const std::string& history_namespace, bool is_greedy) const {
  std::lock_guard lock(mutex_);
  auto found = calibrations_.find(JoinNames({history_namespace, is_greedy ? "greedy" : "sampled"}));
  return (found == calibrations_.end() ? Calibration(false) : *found->second.second).Counts();
}

uint64_t Engine::NumRecoveries() const {
  std::lock_guard lock(mutex_);
  uint64_t num_recoveries = num_recoveries_;
  for (const auto& [handle, request] : requests_) num_recoveries += request->tracker.num_recoveries();
  return num_recoveries;
}

std::string Engine::BlockPath(int64_t handle) const {
  std::lock_guard lock(mutex_);
  auto found = requests_.find(handle);
  if (found == requests_.end()) Refuse("handle: " + std::to_string(handle) + " is not open");
  return labels_.Path(found->second->tracker.label());
}

size_t Engine::DeleteNamespace(const std::string& history_namespace) {
  std::lock_guard lock(mutex_);
  for (auto& [handle, request] : requests_) {
    if (!IsWithinNamespace(request->options.history_namespace, history_namespace)) continue;
    request->is_discarded = true;  // what they still write is not stored either, not even after a resync
    request->LeaveHistories();
    request->stats = &discarded_stats_;
  }
  std::erase_if(
      stats_, [&](const auto& entry) { return IsWithinNamespace(entry.second.history_namespace, history_namespace); });
  std::erase_if(calibrations_,
                [&](const auto& entry) { return IsWithinNamespace(entry.second.first, history_namespace); });
  outbox_.Delete(history_namespace);
  return histories_.Delete(history_namespace);
}

std::vector<BlockStats> Engine::Stats() const {
  std::lock_guard lock(mutex_);
  std::vector<BlockStats> rows;
  for (const auto& [key, row] : stats_) rows.push_back(row);
  return rows;
}

size_t Engine::NumOpenRequests() const {
  std::lock_guard lock(mutex_);
  return requests_.size();
}

size_t Engine::MemoryBytes() const {
  std::lock_guard lock(mutex_);
  return histories_.num_bytes();
}

uint64_t Engine::NumDroppedTokens() const {
  std::lock_guard lock(mutex_);
  return histories_.num_dropped();
}

size_t Engine::NumHistoryTokens() const {
  std::lock_guard lock(mutex_);
  return histories_.NumTokens();
}

void Engine::CheckIntegrity() const {
  std::lock_guard lock(mutex_);
  histories_.CheckIntegrity();
  for (const auto& [handle, request] : requests_) request->own.CheckIntegrity();
}

}  // namespace agentspec
