#include "archive.h"

#include <algorithm>
#include <cstring>

namespace agentspec {

namespace {

constexpr std::string_view kMagic = "ASPH";
constexpr uint64_t kVersion = 2;  // 1 had no prompt tails
constexpr uint64_t kText = 1;     // a text follows
constexpr uint64_t kEnd = 0;      // the history, or the archive, ends here
constexpr size_t kMaxNameBytes = 8192;

std::string OutsideVocabulary(uint64_t token, int32_t vocab_size) {
  return "archive: token id " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(vocab_size);
}

}  // namespace

uint64_t ByteReader::Number() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (at_ == bytes_.size()) throw ArchiveError("archive: it ends in the middle of a number");
    auto byte = static_cast<uint8_t>(bytes_[at_++]);
    value |= uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) return value;
  }
  throw ArchiveError("archive: a number has more than 64 bits");
}

std::string ByteReader::String() {
  uint64_t length = Number();
  if (length > kMaxNameBytes || length > bytes_.size() - at_) throw ArchiveError("archive: a name is too long");
  at_ += length;
  return std::string(bytes_.substr(at_ - length, length));
}

ArchivedText ByteReader::Text(int32_t vocab_size) {
  ArchivedText text;
  uint64_t workflow = Number();
  if (workflow > UINT16_MAX) throw ArchiveError("archive: a workflow has more than 16 bits");
  text.workflow = static_cast<uint16_t>(workflow);
  uint64_t num_prompt_tokens = Number();
  if (num_prompt_tokens > kPromptTailTokens) throw ArchiveError("archive: a prompt's tail is too long");
  for (; num_prompt_tokens > 0; --num_prompt_tokens) {
    uint64_t token = Number();
    if (token >= static_cast<uint64_t>(vocab_size)) throw ArchiveError(OutsideVocabulary(token, vocab_size));
    text.prompt_tail.push_back(static_cast<Token>(token));
  }
  text.paths.push_back(String());
  for (uint64_t left = Number(); left > 0; --left) {
    uint64_t value = Number();
    if (value > static_cast<uint64_t>(vocab_size)) throw ArchiveError(OutsideVocabulary(value - 1, vocab_size));
    text.tokens.push_back(static_cast<Token>(value) - 1);
    if (value == 0) text.paths.push_back(String());
  }
  return text;
}

uint64_t Checksum(std::string_view bytes, uint64_t seed) {
  uint64_t sum = seed ^ bytes.size() * 0x9E3779B97F4A7C15ull;
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof(word), bytes.size() - at));
    sum = (sum ^ word) * 0xD6E8FEB86659FD93ull;
    sum ^= sum >> 32;
  }
  return sum;
}

ArchiveWriter::ArchiveWriter(uint64_t vocabulary_fingerprint) {
  bytes_ = kMagic;
  Number(kVersion);
  Number(vocabulary_fingerprint);
}

void ByteWriter::Number(uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
  bytes_.push_back(static_cast<char>(value));
}

void ByteWriter::String(std::string_view text) {
  Number(text.size());
  bytes_ += text;
}

void ArchiveWriter::BeginHistory(std::string_view history_namespace, std::string_view stage) {
  Number(kText);
  String(history_namespace);
  String(stage);
}

void ByteWriter::Text(const ArchivedText& text) {
  Number(text.workflow);
  Number(text.prompt_tail.size());
  for (Token token : text.prompt_tail) Number(static_cast<uint64_t>(token));
  auto path = text.paths.begin();
  String(*path++);
  Number(text.tokens.size());
  for (Token token : text.tokens) {
    Number(static_cast<uint64_t>(token + 1));
    if (token == kBlockStart) String(*path++);
  }
}

void ArchiveWriter::AddText(const ArchivedText& text) {
  Number(kText);
  Text(text);
}

void ArchiveWriter::EndHistory() { Number(kEnd); }

std::string ArchiveWriter::Finish() && {
  Number(kEnd);
  uint64_t sum = Checksum(bytes_);
  bytes_.append(reinterpret_cast<const char*>(&sum), sizeof(sum));
  return std::move(bytes_);
}

std::vector<ArchivedHistory> ReadArchive(std::string_view bytes, uint64_t vocabulary_fingerprint, int32_t vocab_size) {
  uint64_t sum = 0;
  if (bytes.size() < kMagic.size() + sizeof(sum) || !bytes.starts_with(kMagic))
    throw ArchiveError("archive: these bytes are no archive of histories");
  std::memcpy(&sum, bytes.data() + bytes.size() - sizeof(sum), sizeof(sum));
  bytes.remove_suffix(sizeof(sum));
  ByteReader reader(bytes.substr(kMagic.size()));
  if (uint64_t version = reader.Number(); version != kVersion)
    throw ArchiveError("archive: expected version " + std::to_string(kVersion) + ", got " + std::to_string(version));
  if (Checksum(bytes) != sum) throw ArchiveError("archive: it was cut or changed, its checksum is wrong");
  if (reader.Number() != vocabulary_fingerprint) throw ArchiveError("archive: it was made with another vocabulary");
  std::vector<ArchivedHistory> histories;
  while (reader.Number() != kEnd) {
    auto& history = histories.emplace_back();
    history.history_namespace = reader.String();
    history.stage = reader.String();
    while (reader.Number() != kEnd) history.texts.push_back(reader.Text(vocab_size));
  }
  if (!reader.is_done()) throw ArchiveError("archive: bytes follow its end");
  return histories;
}

}  // namespace agentspec
