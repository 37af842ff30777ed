"""Tags for every LLM call of a LangGraph program: `graph = AgentSpecMiddleware(workflow_id="…").wrap(graph)`."""

from agentspec.middleware.inject import instrument_openai, uninstrument_openai
from agentspec.middleware.langgraph import AgentSpecMiddleware
from agentspec.middleware.scope import stage

__all__ = ["AgentSpecMiddleware", "instrument_openai", "stage", "uninstrument_openai"]
