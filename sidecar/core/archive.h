// Histories as bytes: what requests wrote, not how it is indexed, so that an archive outlives changes of the index.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace agentspec {

// The bytes are no archive of this version and vocabulary, or they were cut or changed.
class ArchiveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One request's stretch of output, oldest token first.
struct ArchivedText {
  uint16_t workflow;               // hash of its workflow id
  std::vector<Token> prompt_tail;  // the prompt's last tokens, at most kPromptTailTokens
  std::vector<Token> tokens;       // with kBlockStart where a block begins
  std::vector<std::string> paths;  // block path of the first token, then of each kBlockStart after it
};

struct ArchivedHistory {
  std::string history_namespace;
  std::string stage;
  std::vector<ArchivedText> texts;  // oldest first
};

// Numbers are LEB128, tokens are token + 1, strings are prefixed by their length.
class ByteWriter {
 public:
  void Number(uint64_t value);
  void String(std::string_view text);
  void Text(const ArchivedText& text);

 protected:
  std::string bytes_;
};

// Throws ArchiveError: the bytes end too early, or a value is out of its bound.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}
  uint64_t Number();
  std::string String();
  ArchivedText Text(int32_t vocab_size);
  bool is_done() const { return at_ == bytes_.size(); }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

// Format, version 2: "ASPH", version, fingerprint of the vocabulary, histories, checksum of all before it.
class ArchiveWriter : private ByteWriter {
 public:
  explicit ArchiveWriter(uint64_t vocabulary_fingerprint);
  void BeginHistory(std::string_view history_namespace, std::string_view stage);
  void AddText(const ArchivedText& text);
  void EndHistory();
  std::string Finish() &&;
};

// Reads a whole archive, or throws ArchiveError. `vocab_size` bounds the token ids.
std::vector<ArchivedHistory> ReadArchive(std::string_view bytes, uint64_t vocabulary_fingerprint, int32_t vocab_size);

// 64 bits over `bytes`; for checksums and fingerprints, not against attackers.
uint64_t Checksum(std::string_view bytes, uint64_t seed = 0);

}  // namespace agentspec
