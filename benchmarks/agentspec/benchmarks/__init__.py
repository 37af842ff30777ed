"""Measurements and the demo: real agents, a real vLLM server and a real model, with AgentSpec and without."""
