"""One training run: the engine (DeepSpeed), the schedule, the loop and its metrics."""
