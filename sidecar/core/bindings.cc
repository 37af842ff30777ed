// The Python module agentspec.sidecar._core: zero-copy arrays in, fresh arrays out, no GIL while the engine works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>

#include "block_pool.h"
#include "engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using ArrayIn = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using ArrayOut = nb::ndarray<T, nb::numpy, nb::ndim<1>>;

template <typename T>
std::span<const T> Span(const ArrayIn<T>& array) {
  return {array.data(), array.size()};
}

template <typename T>
ArrayOut<T> Move(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return ArrayOut<T>(owned->data(), {owned->size()}, owner);
}

using Markers = std::vector<nb::bytes>;
// name, starts, ends, parents, anchor, name marks: the fields of BlockRule
using Rule = std::tuple<std::string, Markers, Markers, std::vector<std::string>, int, Markers>;
using StatsRow =
    std::tuple<std::string, std::string, std::string, std::string, int64_t, int64_t, int64_t, int64_t, int64_t>;

std::string String(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

std::vector<std::string> Strings(const Markers& markers) {
  std::vector<std::string> strings;
  for (const auto& marker : markers) strings.push_back(String(marker));
  return strings;
}

agentspec::Grammar BuildGrammar(const std::vector<Rule>& rules, const Markers& answer_starts) {
  std::vector<agentspec::BlockRule> block_rules;
  for (const auto& [name, starts, ends, parents, anchor, name_marks] : rules)
    block_rules.push_back({name, Strings(starts), Strings(ends), parents,
                           static_cast<agentspec::BlockRule::Anchor>(anchor), Strings(name_marks)});
  return {std::move(block_rules), Strings(answer_starts)};
}

// policy, intensity limit, intensity and slope of the prior, capture sizes, least gain, µs to draft a row: the fields
// of BudgetOptions
using Budget = std::tuple<int, double, double, double, std::vector<int32_t>, float, double>;
// duration_ms and the counts of StepTiming
using Timing = std::tuple<double, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

agentspec::BudgetOptions BuildBudget(const Budget& budget) {
  agentspec::BudgetOptions options;
  const auto& [policy, limit, intensity, slope, capture_sizes, min_gain, draft_us] = budget;
  options.policy = static_cast<agentspec::Policy>(policy);
  options.intensity_limit = limit;
  options.prior = {intensity, slope, capture_sizes};
  options.min_gain = min_gain;
  options.draft_us = draft_us;
  return options;
}

agentspec::StepShape Shape(const Timing& timing) {
  const auto& [ms, rows, drafts, draft_rows, prefill, sampled, context] = timing;
  return {rows, drafts, draft_rows, prefill, sampled, context};
}

void Construct(agentspec::Engine* engine, const nb::bytes& vocabulary, const ArrayIn<int64_t>& offsets,
               const std::vector<Rule>& rules, const Markers& answer_starts, int num_speculative_tokens,
               size_t history_bytes, size_t namespace_bytes, size_t max_histories, double ttl_s, double tokens_per_s,
               bool is_strict, float min_survival, bool has_own, bool has_block_starts, bool has_calibration,
               bool has_prior, const Budget& budget) {
  agentspec::EngineOptions options;
  options.num_speculative_tokens = num_speculative_tokens;
  options.limits = {history_bytes, namespace_bytes, max_histories, ttl_s, tokens_per_s};
  options.is_strict = is_strict;
  options.budget = BuildBudget(budget);
  options.budget.min_survival = min_survival;
  options.has_own = has_own;
  options.has_block_starts = has_block_starts;
  options.has_calibration = has_calibration;
  options.has_prior = has_prior;
  new (engine) agentspec::Engine(String(vocabulary), {offsets.data(), offsets.data() + offsets.size()},
                                 BuildGrammar(rules, answer_starts), options);
}

int AddGrammar(agentspec::Engine& engine, const std::vector<Rule>& rules, const Markers& answer_starts) {
  agentspec::Grammar grammar = BuildGrammar(rules, answer_starts);
  nb::gil_scoped_release release;
  return engine.AddGrammar(std::move(grammar));
}

void Open(agentspec::Engine& engine, int64_t handle, const ArrayIn<int32_t>& tokens, std::string history_namespace,
          std::string workflow_id, std::string stage, int grammar_id, std::string start_block, bool is_structured,
          std::string forced_tool, int max_draft_tokens, bool is_recorded, bool is_reader, bool is_greedy,
          bool is_live) {
  nb::gil_scoped_release release;
  engine.Open(
      handle, Span(tokens),
      {std::move(history_namespace), std::move(workflow_id), std::move(stage), grammar_id, std::move(start_block),
       is_structured, std::move(forced_tool), max_draft_tokens, is_recorded, is_reader, is_greedy, is_live});
}

// Lengths and redundancy of each row, tokens and survival of all drafts, one after the other; the number of draft
// tokens; handles to resync; steps to skip. One object, because an array of numpy's costs as much as the drafting of a
// request.
using Drafts = std::tuple<nb::bytearray, size_t, std::vector<int64_t>, int>;

template <typename T>
char* Append(char* end, const std::vector<T>& values) {
  static_assert(sizeof(T) == 4);
  return static_cast<char*>(std::memcpy(end, values.data(), values.size() * sizeof(T))) + values.size() * sizeof(T);
}

Drafts Step(agentspec::Engine& engine, const ArrayIn<int64_t>& handles, const ArrayIn<int32_t>& positions,
            const ArrayIn<int32_t>& token_offsets, const ArrayIn<int32_t>& token_ids,
            const ArrayIn<int32_t>& num_draft_tokens, const ArrayIn<int32_t>& num_accepted_tokens,
            const ArrayIn<int32_t>& max_draft_tokens, int64_t token_budget, int64_t deadline_us,
            int64_t num_decode_rows, int64_t num_prefill_tokens, int64_t num_context_tokens,
            const std::optional<Timing>& timing, int64_t client_id) {
  agentspec::StepInput input{Span(handles),
                             Span(positions),
                             Span(token_offsets),
                             Span(token_ids),
                             Span(num_draft_tokens),
                             Span(num_accepted_tokens),
                             Span(max_draft_tokens),
                             token_budget,
                             deadline_us,
                             num_decode_rows,
                             num_prefill_tokens,
                             num_context_tokens,
                             client_id,
                             timing ? Shape(*timing) : agentspec::StepShape{},
                             timing ? std::get<0>(*timing) : std::numeric_limits<double>::quiet_NaN()};
  agentspec::StepOutput output;
  {
    nb::gil_scoped_release release;
    output = engine.Step(input);
  }
  nb::bytearray packed(nullptr, 8 * (output.draft_lengths.size() + output.draft_token_ids.size()));
  char* end = static_cast<char*>(packed.data());
  end = Append(Append(end, output.draft_lengths), output.redundancy);
  Append(Append(end, output.draft_token_ids), output.survival);
  return {std::move(packed), output.draft_token_ids.size(), std::move(output.resync_handles), output.skip_steps};
}

void Close(agentspec::Engine& engine, int64_t handle, int reason, int64_t true_length, const ArrayIn<int32_t>& tail) {
  nb::gil_scoped_release release;
  engine.Close(handle, static_cast<agentspec::FinishReason>(reason), true_length, Span(tail));
}

std::vector<StatsRow> Stats(const agentspec::Engine& engine) {
  std::vector<agentspec::BlockStats> rows;
  {
    nb::gil_scoped_release release;
    rows = engine.Stats();
  }
  std::vector<StatsRow> tuples;
  for (auto& row : rows)
    tuples.emplace_back(row.history_namespace, row.workflow_id, row.stage, row.block, row.num_steps, row.num_drafts,
                        row.num_draft_tokens, row.num_accepted_tokens, row.num_tokens);
  return tuples;
}

// client id, timings taken and refused, gate closings, level_ms, noise, trust, whether the gate is open; then one tuple
// a bucket
using BucketRow =
    std::tuple<int64_t, int64_t, int64_t, int64_t, double, int64_t, double, double, double, double, double>;
using BudgetRow =
    std::tuple<int64_t, uint64_t, uint64_t, uint64_t, double, double, double, bool, std::vector<BucketRow>>;

std::vector<BudgetRow> BudgetStats(const agentspec::Engine& engine) {
  std::vector<agentspec::Engine::ClientBudget> budgets;
  {
    nb::gil_scoped_release release;
    budgets = engine.Budgets();
  }
  std::vector<BudgetRow> rows;
  for (const auto& budget : budgets) {
    std::vector<BucketRow> buckets;
    for (const auto& stats : budget.buckets)
      buckets.emplace_back(stats.num_steps, stats.num_draft_steps, stats.num_skipped_steps, stats.num_draft_tokens,
                           stats.num_expected_tokens, stats.num_accepted_tokens, stats.step_ms, stats.predicted_ms,
                           stats.draft_ms, stats.predicted_saved_ms, stats.saved_ms);
    rows.emplace_back(budget.client_id, budget.num_timings, budget.num_skipped_timings, budget.num_gate_closings,
                      budget.level_ms, budget.noise, budget.trust, budget.is_gate_open, std::move(buckets));
  }
  return rows;
}

// Draft lengths, tokens, expected accepted tokens. For tests.
std::tuple<ArrayOut<int32_t>, int64_t, double> AllocateGoodput(const std::vector<std::vector<float>>& survival,
                                                               int64_t num_decode_rows, const std::vector<float>& times,
                                                               float row_ms, float trust, float min_gain,
                                                               float token_ms) {
  std::vector<agentspec::RowDraft> rows;
  for (const auto& row : survival) rows.push_back({row.data(), static_cast<int32_t>(row.size()), 0});
  std::vector<int32_t> budgets(rows.size());
  auto choice =
      agentspec::AllocateByGoodput(rows, num_decode_rows, {times, row_ms, trust, min_gain, token_ms}, budgets);
  return {Move(std::move(budgets)), choice.num_draft_tokens, choice.num_accepted_tokens};
}

ArrayOut<int32_t> Allocate(const ArrayIn<float>& scores, const ArrayIn<int32_t>& lengths, int64_t token_budget) {
  if (scores.size() != lengths.size())
    throw std::invalid_argument("lengths: expected " + std::to_string(scores.size()) + " entries, got " +
                                std::to_string(lengths.size()));
  for (size_t row = 0; row < scores.size(); ++row)
    if (!(scores(row) >= 0 && scores(row) <= 1) || lengths(row) < 0)
      throw std::invalid_argument("row " + std::to_string(row) +
                                  ": expected a score in [0, 1] and a length >= 0, got " + std::to_string(scores(row)) +
                                  " and " + std::to_string(lengths(row)));
  if (token_budget < 0) throw std::invalid_argument("token_budget: expected >= 0, got " + std::to_string(token_budget));
  std::vector<int32_t> budgets(scores.size());
  agentspec::AllocateByRedundancy(scores.data(), lengths.data(), scores.size(), token_budget, budgets.data());
  return Move(std::move(budgets));
}

// Namespace, segments, tokens and bytes of each batch; the namespaces in use.
using Blocks = std::tuple<std::vector<std::tuple<std::string, size_t, size_t, nb::bytes>>, std::vector<std::string>>;

Blocks TakeBlocks(agentspec::Engine& engine) {
  std::vector<std::string> namespaces;
  std::vector<agentspec::SegmentBatch> batches;
  {
    nb::gil_scoped_release release;
    batches = engine.TakeBlocks(namespaces);
  }
  Blocks blocks;
  for (auto& batch : batches)
    std::get<0>(blocks).emplace_back(std::move(batch.history_namespace), batch.num_segments, batch.num_tokens,
                                     nb::bytes(batch.bytes.data(), batch.bytes.size()));
  std::get<1>(blocks) = std::move(namespaces);
  return blocks;
}

}  // namespace

NB_MODULE(_core, module) {
  using agentspec::Engine;
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  module.def("allocate_by_redundancy", &Allocate, "scores"_a.noconvert(), "lengths"_a.noconvert(), "token_budget"_a);
  module.def("pooled_bytes", [] { return agentspec::BlockPool::Shared().UsedBytes(); });
  module.def("allocate_by_goodput", &AllocateGoodput, "survival"_a, "num_decode_rows"_a, "times"_a, "row_ms"_a,
             "trust"_a, "min_gain"_a, "token_ms"_a);
  nb::exception<agentspec::ArchiveError>(module, "ArchiveError", PyExc_ValueError);
  nb::class_<Engine>(module, "Engine")
      .def("__init__", &Construct, "vocabulary"_a, "offsets"_a, "rules"_a, "answer_starts"_a,
           "num_speculative_tokens"_a, "history_bytes"_a, "namespace_bytes"_a, "max_histories"_a, "ttl_s"_a,
           "tokens_per_s"_a, "is_strict"_a, "min_survival"_a, "has_own"_a, "has_block_starts"_a, "has_calibration"_a,
           "has_prior"_a, "budget"_a)
      .def("open", &Open, "handle"_a, "tokens"_a.noconvert(), "history_namespace"_a, "workflow_id"_a, "stage"_a,
           "grammar_id"_a, "start_block"_a, "is_structured"_a, "forced_tool"_a, "max_draft_tokens"_a, "is_recorded"_a,
           "is_reader"_a, "is_greedy"_a, "is_live"_a)
      .def("add_grammar", &AddGrammar, "rules"_a, "answer_starts"_a)
      .def("remove_grammar", &Engine::RemoveGrammar, "id"_a, Unlocked())
      .def(
          "calibration_counts",
          [](const Engine& engine, const std::string& history_namespace, bool is_greedy) {
            std::vector<float> shares;
            for (const auto& count : engine.CalibrationCounts(history_namespace, is_greedy)) {
              shares.push_back(count.accepted);
              shares.push_back(count.total);
            }
            return Move(std::move(shares));
          },
          "history_namespace"_a, "is_greedy"_a)
      .def("num_recoveries", &Engine::NumRecoveries, Unlocked())
      .def("step", &Step, "handles"_a.noconvert(), "positions"_a.noconvert(), "token_offsets"_a.noconvert(),
           "token_ids"_a.noconvert(), "num_draft_tokens"_a.noconvert(), "num_accepted_tokens"_a.noconvert(),
           "max_draft_tokens"_a.noconvert(), "token_budget"_a, "deadline_us"_a, "num_decode_rows"_a,
           "num_prefill_tokens"_a, "num_context_tokens"_a, "timing"_a.none(), "client_id"_a)
      .def(
          "set_policy", [](Engine& engine, int policy) { engine.SetPolicy(static_cast<agentspec::Policy>(policy)); },
          "policy"_a, Unlocked())
      .def(
          "policy", [](const Engine& engine) { return static_cast<int>(engine.policy()); }, Unlocked())
      .def("budget_stats", &BudgetStats)
      .def(
          "export_cost_model",
          [](const Engine& engine, int64_t client_id) {
            std::string bytes = engine.ExportCostModel(client_id);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "client_id"_a)
      .def(
          "import_cost_model",
          [](Engine& engine, int64_t client_id, const nb::bytes& bytes) {
            return engine.ImportCostModel(client_id, std::string_view(bytes.c_str(), bytes.size()));
          },
          "client_id"_a, "bytes"_a)
      .def(
          "predict_step_ms",
          [](const Engine& engine, int64_t client_id, const Timing& timing) {
            return engine.PredictStep(client_id, Shape(timing));
          },
          "client_id"_a, "timing"_a)
      .def("close", &Close, "handle"_a, "reason"_a, "true_length"_a, "tail"_a.noconvert())
      .def(
          "export_histories",
          [](const Engine& engine, const std::string& history_namespace) {
            std::string archive;
            {
              nb::gil_scoped_release release;
              archive = engine.Export(history_namespace);
            }
            return nb::bytes(archive.data(), archive.size());
          },
          "history_namespace"_a)
      .def(
          "export_parts",
          [](const Engine& engine, const std::string& history_namespace, size_t num_parts) {
            std::vector<std::string> archives;
            {
              nb::gil_scoped_release release;
              archives = engine.ExportParts(history_namespace, num_parts);
            }
            std::vector<nb::bytes> parts;
            for (const auto& archive : archives) parts.emplace_back(archive.data(), archive.size());
            return parts;
          },
          "history_namespace"_a, "num_parts"_a)
      .def(
          "import_histories",
          [](Engine& engine, const nb::bytes& archive, const std::string& outer) {
            std::string_view bytes(archive.c_str(), archive.size());
            nb::gil_scoped_release release;
            return engine.Import(bytes, outer);
          },
          "archive"_a, "outer"_a)
      .def(
          "history_sizes",
          [](const Engine& engine, const std::string& history_namespace) {
            std::vector<agentspec::HistorySize> sizes;
            {
              nb::gil_scoped_release release;
              sizes = engine.HistorySizes(history_namespace);
            }
            std::vector<std::tuple<std::string, std::string, size_t, size_t>> tuples;
            for (auto& size : sizes)
              tuples.emplace_back(std::move(size.history_namespace), std::move(size.stage), size.num_tokens,
                                  size.num_bytes);
            return tuples;
          },
          "history_namespace"_a)
      .def("share_blocks", &Engine::ShareBlocks, "max_waiting_tokens"_a, Unlocked())
      .def(
          "wait_for_blocks",
          [](agentspec::Engine& engine, int64_t timeout_us) {
            return engine.WaitForBlocks(std::chrono::microseconds(timeout_us));
          },
          "timeout_us"_a, Unlocked())
      .def("take_blocks", &TakeBlocks)
      .def(
          "merge_blocks",
          [](Engine& engine, const std::string& history_namespace, const nb::bytes& blocks, uint64_t origin) {
            std::string_view bytes(blocks.c_str(), blocks.size());
            nb::gil_scoped_release release;
            return engine.MergeBlocks(history_namespace, bytes, origin);
          },
          "history_namespace"_a, "blocks"_a, "origin"_a)
      .def("num_unshared_tokens", &Engine::NumUnsharedTokens, Unlocked())
      .def("delete_namespace", &Engine::DeleteNamespace, "history_namespace"_a, Unlocked())
      .def("forget_unused", &Engine::ForgetUnused, "max_age_s"_a, Unlocked())
      .def("block_path", &Engine::BlockPath, "handle"_a, Unlocked())
      .def("stats", &Stats)
      .def("num_open_requests", &Engine::NumOpenRequests, Unlocked())
      .def("memory_bytes", &Engine::MemoryBytes, Unlocked())
      .def("num_dropped_tokens", &Engine::NumDroppedTokens, Unlocked())
      .def("num_history_tokens", &Engine::NumHistoryTokens, Unlocked())
      .def("check_integrity", &Engine::CheckIntegrity, Unlocked());
}
