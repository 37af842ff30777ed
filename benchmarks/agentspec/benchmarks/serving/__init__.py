"""vLLM against every method on recorded agent runs: engines in lockstep, each in a process of its own."""
