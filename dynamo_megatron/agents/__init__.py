"""Agents for `rollout.agent` made from environments, and a tool for agents. All of it runs in the agents' processes."""
