"""Bytes to policy and back: one protocol, one worker, three transports, the page and the metrics.

Nothing here knows a model; whatever satisfies `innerloop.contract.Policy` can be served.
"""
