// The engine's budgets: one planner for each engine of the target model that it drafts for.
#include "engine.h"

namespace agentspec {

namespace {

constexpr size_t kMaxClients = 64;  // more engines of the target model than that: all budgets start anew

}  // namespace

BudgetPlanner& Engine::FindPlanner(int64_t client_id) {
  if (planners_.size() >= kMaxClients && !planners_.contains(client_id)) planners_.clear();
  auto& planner = planners_.try_emplace(client_id, options_.budget).first->second;
  planner.set_policy(options_.budget.policy);
  return planner;
}

void Engine::SetPolicy(Policy policy) {
  std::lock_guard lock(mutex_);
  options_.budget.policy = policy;
}

Policy Engine::policy() const {
  std::lock_guard lock(mutex_);
  return options_.budget.policy;
}

std::vector<Engine::ClientBudget> Engine::Budgets() const {
  std::lock_guard lock(mutex_);
  std::vector<ClientBudget> budgets;
  for (const auto& [client_id, planner] : planners_) {
    const CostModel& model = planner.cost_model();
    budgets.push_back({client_id, planner.stats(), model.num_observed(), model.num_skipped(),
                       planner.num_gate_closings(), model.level_ms(), model.noise(), planner.trust(),
                       planner.is_gate_open()});
  }
  return budgets;
}

std::string Engine::ExportCostModel(int64_t client_id) const {
  std::lock_guard lock(mutex_);
  auto found = planners_.find(client_id);
  return found == planners_.end() || !found->second.cost_model().has_level() ? "" : found->second.cost_model().Save();
}

bool Engine::ImportCostModel(int64_t client_id, std::string_view bytes) {
  std::lock_guard lock(mutex_);
  return FindPlanner(client_id).LoadCostModel(bytes);
}

double Engine::PredictStep(int64_t client_id, const StepShape& shape) const {
  std::lock_guard lock(mutex_);
  auto found = planners_.find(client_id);
  if (found == planners_.end() || !found->second.cost_model().has_level()) return -1;
  return found->second.cost_model().Predict(shape);
}

}  // namespace agentspec
