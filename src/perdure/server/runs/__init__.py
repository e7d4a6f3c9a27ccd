"""Runs of graphs: their requests, queue, execution, events, crons and webhooks."""
