"""AgentSpec inside vLLM: hooks that draft for the whole batch, by documented extension points and without a fork."""
