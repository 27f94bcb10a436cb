"""What makes an agent from an environment. It runs in the processes of agents."""
