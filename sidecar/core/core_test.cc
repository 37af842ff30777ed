// Checks of the core that need no Python, for the sanitizers: random plays, generations, budgets, threads.
#include "core_test.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "budget.h"
#include "engine.h"

namespace {

using namespace agentspec;

const std::vector<std::string> kPieces = {"x", "y", "<t>", "</t>", "|", "<", "/t>", "t>", "</t><t>", "||"};

Grammar Rules() { return {{{"a", {"<t>"}, {"</t>"}, {"text", "c", "a"}}, {"c", {"|"}, {"|"}, {"text", "a"}}}, {}}; }

std::vector<int64_t> Offsets(const std::vector<std::string>& pieces) {
  std::vector<int64_t> offsets = {0};
  for (const auto& piece : pieces) offsets.push_back(offsets.back() + static_cast<int64_t>(piece.size()));
  return offsets;
}

std::string Joined(const std::vector<std::string>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::string());
}

// Plays requests of its own against an engine that it may share with other players.
class Player {
 public:
  Player(Engine& engine, int num_speculative_tokens, uint32_t seed, int64_t first_handle)
      : engine_(engine), num_speculative_tokens_(num_speculative_tokens), random_(seed), next_handle_(first_handle) {}

  void Play() {
    switch (random_.Below(9)) {
      case 0:
      case 1:
        return Open(next_handle_++);
      case 2:
        if (int64_t handle = AnyHandle(); handle >= 0) Open(handle);  // a resync, or a handle used again elsewhere
        return;
      case 3:
        if (int64_t handle = AnyHandle(); handle >= 0) Close(handle);
        return;
      case 4:
        return Archive();
      default:
        Step();
    }
  }

  void CloseAll() {
    while (!positions_.empty()) Close(positions_.begin()->first);
  }

 private:
  int64_t AnyHandle() {
    if (positions_.empty()) return -1;
    return std::next(positions_.begin(), random_.Below(static_cast<int>(positions_.size())))->first;
  }

  std::vector<Token> Text(int length) {
    std::vector<Token> text;
    for (int i = 0; i < length; ++i) text.push_back(random_.OneOf({0, 1, random_.Below(4), random_.Below(10)}));
    return text;
  }

  void Open(int64_t handle) {
    RequestOptions options;
    options.history_namespace = random_.OneOf<const char*>({"n", "m"});
    options.workflow_id = random_.OneOf<const char*>({"w", "v"});
    options.stage = random_.OneOf<const char*>({"s", "s", "t", "u"});
    options.start_block = random_.OneOf<const char*>({"", "a", "a/x", "y/c"});
    options.max_draft_tokens = random_.OneOf({64, 64, 3, 0});
    options.is_reader = random_.Below(6) > 0;
    options.is_recorded = options.is_reader && random_.Below(6) > 0;
    engine_.Open(handle, Text(random_.OneOf({0, 5, 40})), options);
    positions_[handle] = 0;
  }

  void Step() {
    std::vector<int64_t> handles;
    std::vector<int32_t> positions, offsets = {0}, drafted, accepted, room;
    std::vector<Token> tokens;
    for (auto& [handle, position] : positions_) {
      if (random_.Below(3) == 0) continue;
      bool is_lost = random_.Below(30) == 0;
      auto text = Text(random_.OneOf({0, 1, 1, 3, 50}));
      handles.push_back(handle);
      positions.push_back(position + is_lost);
      tokens.insert(tokens.end(), text.begin(), text.end());
      offsets.push_back(static_cast<int32_t>(tokens.size()));
      drafted.push_back(random_.Below(3));
      accepted.push_back(random_.Below(drafted.back() + 1));
      room.push_back(random_.OneOf({64, 64, 2, 0}));
      if (!is_lost) position += static_cast<int32_t>(text.size());
    }
    int64_t budget = random_.OneOf({0, 5, 100000});
    engine_.SetPolicy(static_cast<Policy>(random_.OneOf({0, 0, 1, 2, 3, 4, 5})));
    StepShape last{random_.OneOf({0, 4, 200}),  random_.OneOf({0, 9, 3000}), random_.OneOf({0, 4}),
                   random_.OneOf({0, 0, 9000}), random_.OneOf({0, 4}),       random_.OneOf({0, 100000})};
    double duration_ms = random_.OneOf({std::nan(""), -1.0, 0.0, 1e-9, 1.0, 30.0, 50'000.0, HUGE_VAL});
    int64_t num_prefill_tokens = random_.OneOf({0, 0, 4096}), client_id = random_.Below(100);
    StepInput input{handles,
                    positions,
                    offsets,
                    tokens,
                    drafted,
                    accepted,
                    room,
                    budget,
                    random_.OneOf({0, 0, 1}),
                    static_cast<int64_t>(handles.size()),
                    num_prefill_tokens,
                    1000,
                    client_id,
                    last,
                    duration_ms};
    CheckAnswer(input, engine_.Step(input));
  }

  void Archive() {
    std::string history_namespace = random_.OneOf<const char*>({"n", "m"});
    switch (random_.Below(6)) {
      case 0:
        engine_.DeleteNamespace(history_namespace);
        return;
      case 1:
        engine_.ForgetUnused(random_.Below(2));
        return;
      case 2:
        engine_.Import(engine_.Export(history_namespace));
    }
  }

  void CheckAnswer(const StepInput& input, const StepOutput& output) {
    size_t num_drafted = 0;
    CHECK(output.draft_lengths.size() == input.handles.size() && output.redundancy.size() == input.handles.size());
    for (size_t row = 0; row < input.handles.size(); ++row) {
      int32_t length = output.draft_lengths[row];
      CHECK(length >= 0 && length <= std::min(num_speculative_tokens_, input.max_draft_tokens[row]));
      CHECK(output.redundancy[row] >= 0 && output.redundancy[row] <= 1);
      float survival = 1;
      for (int32_t i = 0; i < length; ++i, ++num_drafted) {
        CHECK(output.draft_token_ids[num_drafted] >= 0 && output.draft_token_ids[num_drafted] < 10);
        CHECK(output.survival[num_drafted] > 0 && output.survival[num_drafted] <= survival);
        survival = output.survival[num_drafted];
      }
    }
    CHECK(num_drafted == output.draft_token_ids.size() && num_drafted == output.survival.size());
    CHECK(static_cast<int64_t>(num_drafted) <= input.token_budget);
  }

  void Close(int64_t handle) {
    auto reason = static_cast<FinishReason>(random_.Below(4));
    int64_t true_length = std::max(0, positions_[handle] + random_.Below(8) - 4);
    engine_.Close(handle, reason, true_length, Text(random_.OneOf({0, 0, 4})));
    positions_.erase(handle);
  }

  Engine& engine_;
  int num_speculative_tokens_;
  Random random_;
  int64_t next_handle_;
  std::map<int64_t, int32_t> positions_;  // output tokens handed over, by open handle
};

EngineOptions Options(uint32_t seed, size_t history_bytes) {
  EngineOptions options;
  options.num_speculative_tokens = seed % 3 == 0 ? 64 : 4;
  options.limits.num_bytes = history_bytes;
  options.is_strict = seed % 2 == 0;
  return options;
}

// What `source` has for other engines goes to `target`.
void Carry(Engine& source, Engine& target, std::chrono::microseconds timeout = {}) {
  std::vector<std::string> namespaces;
  source.WaitForBlocks(timeout);
  for (const auto& batch : source.TakeBlocks(namespaces)) {
    CHECK(target.MergeBlocks(batch.history_namespace, batch.bytes, 1) <= batch.num_tokens);
    CHECK(batch.num_segments > 0 && batch.num_tokens > 0);
  }
}

void TestRandomPlaysKeepIntegrityAndQuota() {
  constexpr size_t kQuotas[] = {1, 200, 700, 6000, 23000, 60000, 1 << 20};
  for (uint32_t seed = 0; seed < 28; ++seed) {
    size_t quota = kQuotas[seed % std::size(kQuotas)];
    EngineOptions options = Options(seed, quota);
    Engine engine(Joined(kPieces), Offsets(kPieces), Rules(), options);
    Engine follower(Joined(kPieces), Offsets(kPieces), Rules(), options);
    engine.ShareBlocks(seed % 2 == 0 ? 1 << 12 : 40);
    Player player(engine, options.num_speculative_tokens, seed, 0);
    for (int call = 0; call < 200; ++call) {
      player.Play();
      engine.CheckIntegrity();
      CHECK(engine.MemoryBytes() <= quota);
      if (call % 5 == 0) Carry(engine, follower);
      follower.CheckIntegrity();
      CHECK(follower.MemoryBytes() <= quota);
    }
    player.CloseAll();
    engine.CheckIntegrity();
    CHECK(engine.NumOpenRequests() == 0);
  }
}

void TestThreadsShareOneEngine() {
  EngineOptions options = Options(3, 300000);
  Engine engine(Joined(kPieces), Offsets(kPieces), Rules(), options);
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 3; ++seed)
    threads.emplace_back([&engine, &options, seed] {
      Player player(engine, options.num_speculative_tokens, seed, seed * 100000);
      for (int call = 0; call < 800; ++call) {
        player.Play();
        if (call % 50 == 0) engine.CheckIntegrity();
        CHECK(engine.MemoryBytes() <= 300000);
        CHECK(engine.Stats().size() <= 4096 && engine.NumHistoryTokens() < 300000);
      }
      player.CloseAll();
    });
  Engine follower(Joined(kPieces), Offsets(kPieces), Rules(), options);
  std::atomic<bool> is_over = false;
  std::thread carrier([&] {
    while (!is_over) Carry(engine, follower, std::chrono::milliseconds(5));
  });
  for (auto& thread : threads) thread.join();
  is_over = true;
  carrier.join();
  CHECK(engine.NumOpenRequests() == 0);
  CHECK(follower.NumHistoryTokens() > 0 && follower.MemoryBytes() <= 300000);
  follower.CheckIntegrity();
}

void TestChangedSegmentsAreRefusedOrTakenWhole() {
  Engine engine(Joined(kPieces), Offsets(kPieces), Rules(), Options(1, 1 << 20));
  engine.ShareBlocks(1 << 20);
  Player player(engine, 4, 1, 0);
  while (engine.NumHistoryTokens() < 200) player.Play();
  std::vector<std::string> namespaces;
  const auto batches = engine.TakeBlocks(namespaces);
  const std::string& bytes = batches.front().bytes;
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    std::string changed = bytes;
    for (int i = random.Below(3); i >= 0; --i)
      changed[static_cast<size_t>(random.Below(static_cast<int>(bytes.size())))] = static_cast<char>(random.Below(256));
    changed.resize(changed.size() - static_cast<size_t>(random.OneOf({0, random.Below(20)})));
    Engine follower(Joined(kPieces), Offsets(kPieces), Rules(), Options(1, 1 << 20));
    try {
      follower.MergeBlocks("n", changed, seed);
    } catch (const ArchiveError&) {
      CHECK(follower.NumHistoryTokens() == 0);
    }
    follower.CheckIntegrity();
  }
}

// The checksum is made right again, so that the reader behind it is tested.
void TestChangedArchivesAreRefusedOrTakenWhole() {
  Engine engine(Joined(kPieces), Offsets(kPieces), Rules(), Options(1, 1 << 20));
  Player player(engine, 4, 1, 0);
  while (engine.NumHistoryTokens() < 200) player.Play();
  const std::string archive = engine.Export("n");
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    std::string changed = archive.substr(0, archive.size() - sizeof(uint64_t));
    if (random.Below(3) == 0) changed.resize(static_cast<size_t>(random.Below(static_cast<int>(changed.size()))));
    for (int i = random.Below(4); i > 0 && !changed.empty(); --i)
      changed[static_cast<size_t>(random.Below(static_cast<int>(changed.size())))] =
          static_cast<char>(random.Below(256));
    uint64_t sum = Checksum(changed);
    changed.append(reinterpret_cast<const char*>(&sum), sizeof(sum));
    Engine copy(Joined(kPieces), Offsets(kPieces), Rules(), Options(seed, 1 << 20));
    try {
      copy.Import(changed);
    } catch (const ArchiveError&) {
      CHECK(copy.NumHistoryTokens() == 0);
    }
    copy.CheckIntegrity();
  }
}

void TestMarkersSplitInAnyWayGiveTheSamePath() {
  Grammar grammar = Rules();
  std::vector<std::string> bytes(256);
  for (int byte = 0; byte < 256; ++byte) bytes[static_cast<size_t>(byte)] = static_cast<char>(byte);
  Vocabulary by_piece(Joined(kPieces), Offsets(kPieces)), by_byte(Joined(bytes), Offsets(bytes));
  LabelTable labels;
  for (uint32_t seed = 0; seed < 100; ++seed) {
    Random random(seed);
    BlockTracker whole(by_piece, grammar, labels, {"a/x/c"}), split(by_byte, grammar, labels, {"a/x/c"});
    for (int i = 0; i < 200; ++i) {
      Token token = random.Below(10);
      whole.Advance(by_piece, grammar, labels, token);
      for (char byte : by_piece.Bytes(token)) split.Advance(by_byte, grammar, labels, static_cast<uint8_t>(byte));
      CHECK(whole.label() == split.label());
    }
  }
}

void TestArbitraryBytesNeverEscapeTheTracker() {
  Grammar grammar = Rules();
  Random random(1);
  std::vector<std::string> pieces(1000);
  for (auto& piece : pieces)
    for (int i = random.Below(9); i > 0; --i)
      piece += static_cast<char>(random.OneOf<int>({random.Below(256), '<', '|'}));
  Vocabulary vocabulary(Joined(pieces), Offsets(pieces));
  LabelTable labels;
  BlockTracker tracker(vocabulary, grammar, labels, {});
  for (int i = 0; i < 20000; ++i) {
    tracker.Advance(vocabulary, grammar, labels, random.Below(1000));
    CHECK(!labels.Path(tracker.label()).empty());
  }
}

void TestBudgetsAreSpentAndNoRowGetsMoreThanItDrafted() {
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    auto num_rows = static_cast<size_t>(random.Below(300));
    int64_t budget = random.OneOf({0, 1, random.Below(300), random.Below(10000)}), usable = 0, spent = 0;
    std::vector<float> scores(num_rows);
    std::vector<int32_t> lengths(num_rows), budgets(num_rows, -1);
    for (size_t row = 0; row < num_rows; ++row) {
      scores[row] = random.OneOf({0.0f, 1.0f, 1e-45f, static_cast<float>(random.Below(1000)) / 1000});
      lengths[row] = random.Below(65);
      if (scores[row] > 0) usable += lengths[row];
    }
    AllocateByRedundancy(scores.data(), lengths.data(), num_rows, budget, budgets.data());
    for (size_t row = 0; row < num_rows; ++row) {
      CHECK(budgets[row] >= 0 && budgets[row] <= (scores[row] > 0 ? lengths[row] : 0));
      spent += budgets[row];
    }
    CHECK(spent == std::min(budget, usable));
  }
}

}  // namespace

int main() {
  TestBudgetsAreSpentAndNoRowGetsMoreThanItDrafted();
  TestMarkersSplitInAnyWayGiveTheSamePath();
  TestArbitraryBytesNeverEscapeTheTracker();
  TestIndexes();
  TestChangedArchivesAreRefusedOrTakenWhole();
  TestChangedSegmentsAreRefusedOrTakenWhole();
  TestRandomPlaysKeepIntegrityAndQuota();
  TestThreadsShareOneEngine();
  std::puts("core_test: all passed");
}
