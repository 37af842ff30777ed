// The engine's histories as a whole: saved, loaded, forgotten.
#include <algorithm>
#include <map>
#include <stdexcept>

#include "engine.h"

namespace agentspec {

template <typename Visitor>
void Engine::VisitTexts(const History& history, std::unique_lock<std::mutex>& lock, Visitor&& visit) const {
  for (const auto& generation : history.Generations()) {
    for (uint32_t page = 0; page < generation->num_pages(); ++page) {
      if (generation->page(page).previous != ContextIndex::kNoPage) continue;
      if (ArchivedText text = ReadText(*generation, page); !text.tokens.empty()) visit(text);
      LetStepsGoFirst(lock);
    }
  }
}

std::string Engine::Export(const std::string& history_namespace) const {
  ArchiveWriter writer(vocabulary_.fingerprint());
  std::unique_lock lock(mutex_);
  for (const auto& history : histories_.Within(history_namespace)) {
    writer.BeginHistory(history->history_namespace, history->stage);
    VisitTexts(*history, lock, [&](const ArchivedText& text) { writer.AddText(text); });
    writer.EndHistory();
  }
  return std::move(writer).Finish();
}

std::vector<std::string> Engine::ExportParts(const std::string& history_namespace, size_t num_parts) const {
  if (num_parts == 0) throw std::invalid_argument("num_parts: expected at least 1, got 0");
  std::vector<ArchiveWriter> writers(num_parts, ArchiveWriter(vocabulary_.fingerprint()));
  std::unique_lock lock(mutex_);
  for (const auto& history : histories_.Within(history_namespace)) {
    if (history->history_namespace != history_namespace) continue;
    size_t num_tokens = std::max<size_t>(history->num_tokens(), 1), num_written = 0;
    auto writer = writers.begin();
    writer->BeginHistory(history->history_namespace, history->stage);
    VisitTexts(*history, lock, [&](const ArchivedText& text) {
      size_t part = std::min(num_parts - 1, num_written * num_parts / num_tokens);
      if (auto next = writers.begin() + static_cast<std::ptrdiff_t>(part); next != writer) {
        writer->EndHistory();
        writer = next;
        writer->BeginHistory(history->history_namespace, history->stage);
      }
      writer->AddText(text);
      num_written += text.tokens.size();
    });
    writer->EndHistory();
  }
  std::vector<std::string> archives;
  for (auto& writer : writers) archives.push_back(std::move(writer).Finish());
  return archives;
}

ArchivedText Engine::ReadText(const ContextIndex& index, uint32_t page) const {
  ArchivedText text{index.page(page).workflow, {}, {}, {}};
  auto next = [&] { return static_cast<uint32_t>(index.page(page).next); };
  for (; page != ContextIndex::kNoPage && index.page(page).label == kPromptTailLabel; page = next())
    for (uint32_t i = 0; i < index.page(page).fill; ++i) text.prompt_tail.push_back(index.page(page)[i]);
  if (page != ContextIndex::kNoPage) text.paths.push_back(labels_.Path(index.page(page).label));
  for (; page != ContextIndex::kNoPage; page = next()) {
    for (uint32_t i = 0; i < index.page(page).fill; ++i) {
      text.tokens.push_back(index.page(page)[i]);
      if (text.tokens.back() == kBlockStart) text.paths.push_back(labels_.Path(index.page(page).label));
    }
  }
  return text;
}

std::vector<HistorySize> Engine::HistorySizes(const std::string& history_namespace) const {
  std::lock_guard lock(mutex_);
  std::map<std::pair<std::string, std::string>, HistorySize> sizes;  // a stage may have several, of one workflow each
  for (const auto& history : histories_.Within(history_namespace)) {
    auto& size = sizes[{history->history_namespace, history->stage}];
    size.num_tokens += history->num_tokens();
    size.num_bytes += history->MemoryBytes();
  }
  std::vector<HistorySize> rows;
  for (const auto& [key, size] : sizes) rows.push_back({key.first, key.second, size.num_tokens, size.num_bytes});
  return rows;
}

size_t Engine::Import(std::string_view archive, std::string_view outer) {
  auto histories = ReadArchive(archive, vocabulary_.fingerprint(), vocabulary_.size());
  for (const auto& archived : histories)
    if (!outer.empty() && !IsWithinNamespace(archived.history_namespace, outer))
      throw ArchiveError("archive: holds a history of the namespace " + archived.history_namespace + ", expected " +
                         std::string(outer) + " or one within it");
  size_t num_tokens = 0;
  for (const auto& archived : histories) {
    for (const auto& text : archived.texts) {
      std::lock_guard lock(mutex_);  // of one text, so that steps go on between two
      histories_.Tick(clock_, Clock::now());
      auto history = histories_.Find(archived.history_namespace, archived.stage);
      if (history && histories_.IsCrowding(*history, text.workflow))
        history = histories_.Find(archived.history_namespace, archived.stage, text.workflow);
      if (!history) continue;
      History::Chain chain;
      TextWindow window(options_.is_strict);
      StoreArchived(*history, chain, window, {next_writer_++, text.workflow}, text);
      num_tokens += text.tokens.size();
      history.reset();
      histories_.ForgetOldest();
    }
  }
  return num_tokens;
}

void Engine::StoreArchived(History& history, History::Chain& chain, TextWindow& text, TextSource source,
                           const ArchivedText& archived) {
  std::vector<FiledToken> tokens;
  tokens.reserve(archived.prompt_tail.size() + archived.tokens.size());
  auto push = [&](Token token, Label label) {
    tokens.push_back({token, label, false, text.Tags()});
    text.Push(token);
  };
  for (Token token : archived.prompt_tail) push(token, kPromptTailLabel);
  auto path = archived.paths.begin();
  Label label = labels_.Find(*path);
  for (Token token : archived.tokens) {
    if (token == kBlockStart) label = labels_.Find(*++path);
    push(token, label);
  }
  histories_.Append(history, chain, tokens, source);
}

void Engine::StoreOutput(Request& request, std::span<const FiledToken> tokens) {
  uint16_t workflow = request.source.workflow;
  if (!request.is_diverted && histories_.IsCrowding(*request.history, workflow)) {
    request.is_diverted = true;
    request.chain = {};
  }
  if (request.is_diverted && !request.private_history)
    request.private_history = histories_.Find(request.options.history_namespace, request.options.stage, workflow);
  request.num_published += static_cast<int64_t>(tokens.size());
  History* target = request.target();
  if (target == nullptr) {
    histories_.Drop(tokens.size());
    return Withhold(request, tokens.size());
  }
  target->last_used = clock_;
  if (!request.options.is_live)
    histories_.Append(*target, request.chain, tokens, request.source);
  else if (!histories_.Store(*target, request.chain, tokens, request.source))
    return Withhold(request, tokens.size());
  Share(request, tokens);
}

size_t Engine::ForgetUnused(double max_age_s) {
  if (!(max_age_s >= 0)) throw std::invalid_argument("max_age_s: expected >= 0, got " + std::to_string(max_age_s));
  std::lock_guard lock(mutex_);
  return histories_.ForgetUnused(max_age_s);
}

}  // namespace agentspec
