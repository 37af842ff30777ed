#include <algorithm>
#include <map>
#include <unordered_map>
#include <vector>

#include "core_test.h"
#include "drafter.h"
#include "history.h"

namespace agentspec {

namespace {

std::vector<FiledToken> Filed(const std::vector<Token>& tokens, bool is_strict = false) {
  TextWindow window(is_strict);
  std::vector<FiledToken> filed;
  for (Token token : tokens) {
    filed.push_back({token, 0, false, window.Tags()});
    window.Push(token);
  }
  return filed;
}

TextWindow Window(const std::vector<Token>& tokens, bool is_strict = false) {
  TextWindow window(is_strict);
  for (Token token : tokens) window.Push(token);
  return window;
}

std::vector<Token> DraftAfter(const History& history, const std::vector<Token>& tokens) {
  Drafter drafter(DraftWeights{}, false);
  drafter.Clear();
  TextWindow window = Window(tokens);
  ContextTags contexts = window.Tags();
  for (const ContextIndex* index : {history.current(), history.previous()}) {
    if (index == nullptr) continue;
    Query query{index, &contexts, &window, 0, 0, 999, false};
    Drafter::Find(query);
    drafter.Gather(query);
  }
  Draft draft;
  drafter.Vote(8, 0.02f, Calibration(false), draft);
  std::vector<Token> drafted;
  for (int i = 0; i < draft.length; ++i) drafted.push_back(draft.tokens[static_cast<size_t>(i)].token);
  return drafted;
}

void TestATableKeepsEveryTagThroughItsSplits() {
  for (size_t reserved : {0, 100, 50000}) {
    SlotTable table;
    table.Reserve(reserved);
    std::unordered_map<uint32_t, uint32_t> expected = {{0, 7}};
    table.Get(0) = 7;
    std::mt19937 generator(1);
    while (expected.size() < 60000) {
      uint32_t tag = generator(), value = generator() | 1;
      uint32_t& stored = table.Get(tag);
      CHECK(stored == (expected.contains(tag) ? expected[tag] : 0));
      stored = expected[tag] = value;
    }
    for (auto [tag, value] : expected) CHECK(table.Find(tag) == value);
    for (int i = 0; i < 1000; ++i)
      if (uint32_t tag = generator(); !expected.contains(tag)) CHECK(table.Find(tag) == 0);
    CHECK(table.size() == expected.size());
    size_t num_visited = 0;
    table.CheckIntegrity([&](uint32_t) { ++num_visited; });
    CHECK(num_visited == expected.size());
    CHECK(table.MemoryBytes() < expected.size() * 24);
  }
}

void TestBucketsAreReusedAndNeverOverlap() {
  Random random(1);
  BucketPool pool;
  std::map<uint32_t, int> sizes;  // by bucket
  for (int i = 0; i < 20000; ++i) {
    if (!sizes.empty() && random.Below(3) == 0) {
      auto it = std::next(sizes.begin(), random.Below(static_cast<int>(std::min<size_t>(sizes.size(), 50))));
      pool.Free(it->first, it->second);
      sizes.erase(it);
    } else {
      int size = random.Below(BucketPool::kNumSizes);
      uint32_t bucket = pool.Add(size);
      CHECK(sizes.emplace(bucket, size).second);
      for (uint32_t word = 0; word <= BucketPool::Capacity(size); ++word) pool[bucket][word] = bucket;
    }
  }
  for (auto [bucket, size] : sizes)
    for (uint32_t word = 0; word <= BucketPool::Capacity(size); ++word) CHECK(pool[bucket][word] == bucket);
}

// The window's rolling hashes against those of the same text that begins elsewhere.
void TestContextsDependOnTheirOwnTokensAlone() {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    std::vector<Token> text;
    for (int i = 0; i < 200; ++i) text.push_back(random.OneOf({random.Below(3), random.Below(1 << 23), kBlockStart}));
    bool is_strict = seed % 2 == 0;
    ContextTags all = Window(text, is_strict).Tags();
    std::vector<Token> end(text.end() - kMaxContext - 1, text.end());
    if (end[0] == kBlockStart) end[0] = 5;
    ContextTags same = Window(end, is_strict).Tags();
    CHECK(all.num_orders == same.num_orders && all.is_whole == same.is_whole);
    CHECK(std::equal(all.tag.begin(), all.tag.begin() + all.num_orders, same.tag.begin()));
    end.back() = end.back() == 1 ? 2 : 1;
    CHECK(Window(end, is_strict).Tags().tag[0] != all.tag[0]);
  }
}

void TestEveryPlaceOfALargeIndexIsFoundByWhatPrecedesIt() {
  Random random(3);
  std::vector<Token> text = {kBlockStart};
  for (int i = 0; i < 100000; ++i)
    text.push_back(random.OneOf({random.Below(4), random.Below(300), random.Below(1 << 23)}));
  ContextIndex index(false);
  uint32_t page = ContextIndex::kNoPage;
  CHECK(index.Append(Filed(text), {1, 2}, page) == text.size());
  index.CheckIntegrity();
  CHECK(index.num_tokens() == text.size() - 1 && index.MemoryBytes() < 32 * text.size());
  TextWindow window(false);
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    window.Push(text[i]);
    if (i % 7 != 0) continue;
    std::array<Position, ContextIndex::kBucketPositions> positions;
    int num_positions = index.Positions(index.Find(window.Tags()).value, positions.data());
    CHECK(num_positions > 0);
    bool is_found = false;
    for (int j = 0; j < num_positions; ++j) {
      is_found |= positions[static_cast<size_t>(j)] == i + 1;
      CHECK(index.MatchLength(positions[static_cast<size_t>(j)], window) > 0);
    }
    // It may have left a ring of the latest, but only where that ring is full.
    CHECK(is_found || num_positions == ContextIndex::kBucketPositions);
    if (is_found)
      CHECK(index.MatchLength(static_cast<Position>(i + 1), window) ==
            static_cast<int>(std::min<size_t>(i + 1, kMaxContext)));
  }
}

void TestTheGenerationBeforeTheCurrentOneIsStillDraftedFrom() {
  using Tokens = std::vector<Token>;
  History history("n", "s", false);
  auto append = [&](const Tokens& tokens) {
    History::Chain chain;
    history.Append(chain, Filed(tokens), {1, 0});
  };
  append({kBlockStart, 1, 2, 3});
  history.Rotate();
  append({kBlockStart, 4, 5, 6});
  CHECK((DraftAfter(history, {kBlockStart, 1}) == Tokens{2, 3}));
  CHECK((DraftAfter(history, {kBlockStart, 4}) == Tokens{5, 6}));
  history.Rotate();
  CHECK((DraftAfter(history, {kBlockStart, 1}) == Tokens{}));
  CHECK((DraftAfter(history, {kBlockStart, 4}) == Tokens{5, 6}));
  history.CheckIntegrity();
}

void TestATextGoesOnInTheNextGeneration() {
  History history("n", "s", false);
  std::vector<Token> text = {kBlockStart};
  for (Token token = 0; token < 200; ++token) text.push_back(token);
  auto filed = Filed(text);
  History::Chain chain;
  history.Append(chain, std::span(filed).first(100), {1, 0});
  history.Rotate();
  history.Append(chain, std::span(filed).subspan(100), {1, 0});
  CHECK((DraftAfter(history, {7, 8}) == std::vector<Token>{9, 10, 11, 12, 13, 14, 15, 16}));
  CHECK(DraftAfter(history, {150, 151}).front() == 152);
  history.CheckIntegrity();
}

}  // namespace

void TestIndexes() {
  TestATableKeepsEveryTagThroughItsSplits();
  TestBucketsAreReusedAndNeverOverlap();
  TestContextsDependOnTheirOwnTokensAlone();
  TestEveryPlaceOfALargeIndexIsFoundByWhatPrecedesIt();
  TestTheGenerationBeforeTheCurrentOneIsStillDraftedFrom();
  TestATextGoesOnInTheNextGeneration();
}

}  // namespace agentspec
