"""From loops to kernels: dependences, inlining, fusion, order, memory."""
