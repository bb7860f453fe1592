"""Runs any plan and knows no model: arena, interpreter, capture, tick, sessions, capsules, export."""
