// Words that every part of the core shares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace agentspec {

using Token = int32_t;      // token id; >= 0, or kBlockStart
using Label = uint16_t;     // block path, index into LabelTable
using Position = uint32_t;  // place of one token in a ContextIndex

// Stands in a token log where a block (or a request's output) begins.
inline constexpr Token kBlockStart = -1;
// Block path of a prompt in a request's own index; every block may draft from it.
inline constexpr Label kPromptLabel = 0xFFFF;
// Block path of a prompt's end in a shared history: context of the output that follows, never drafted.
inline constexpr Label kPromptTailLabel = 0xFFFE;
inline constexpr size_t kPromptTailTokens = 15;  // with the output's block start one page would be full
inline constexpr int kMaxDraftTokens = 64;
inline constexpr int32_t kMaxVocabulary = (1 << 23) - 1;  // a token is kept in 3 bytes

}  // namespace agentspec
