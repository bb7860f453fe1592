"""Official implementations, run on the same checkpoint and read stage by stage; imported only when asked for."""
