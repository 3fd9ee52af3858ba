"""Roles in Ray actors: the ports of the control plane over workers that run on other nodes."""
