"""How one program becomes several towers: the agent that starts them, watches them and says how the job ended."""
