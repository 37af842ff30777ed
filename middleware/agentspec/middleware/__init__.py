"""Tags for every LLM call of a LangGraph program: `graph = AgentSpecMiddleware(workflow_id="…").wrap(graph)`."""

from agentspec.middleware.feedback import StageStats
from agentspec.middleware.grammar import Block, BlockGrammar
from agentspec.middleware.http_clients import instrument_httpx, uninstrument_httpx
from agentspec.middleware.inject import instrument_openai, uninstrument_openai
from agentspec.middleware.langgraph import AgentSpecMiddleware
from agentspec.middleware.scope import stage
from agentspec.middleware.threads import instrument_threads, uninstrument_threads
from agentspec.middleware.tool_calls import AgentSpecToolMiddleware

__all__ = [
    "AgentSpecMiddleware",
    "AgentSpecToolMiddleware",
    "Block",
    "BlockGrammar",
    "StageStats",
    "instrument_httpx",
    "instrument_openai",
    "instrument_threads",
    "stage",
    "uninstrument_httpx",
    "uninstrument_openai",
    "uninstrument_threads",
]
