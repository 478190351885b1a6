"""From loops to kernels: dependences, inlining, fusion, order, memory.

Each step is a file and takes and gives data that can be looked at; `pipelines.schedule` is their
list. Comes in: a LoopProgram. Goes out: a Plan.
"""
