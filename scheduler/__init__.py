"""Which tokens run in the next step: admission, budget, preemption, finishing; the engine loop and its journal."""
