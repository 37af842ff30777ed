#include "history_account.h"

namespace agentspec {

double NamespaceAccount::BytesOf(uint16_t workflow) const {
  auto found = workflows.find(workflow);
  if (found == workflows.end() || num_written == 0) return 0;
  return static_cast<double>(num_bytes) * static_cast<double>(found->second.num_written) /
         static_cast<double>(num_written);
}

}  // namespace agentspec
