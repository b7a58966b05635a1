"""What only a GPU can answer, in under ten minutes on one: ``python -m benchmarks.gpu_check --json PATH``.

Each section asks one question and runs in a process of its own, with a bound on its time: one that aborts or hangs costs
its own figures and no others. ``--cpu`` runs the same sections in this process with small sizes; it says nothing about a
GPU and keeps the script from rotting.
"""
