"""Operations on whole batches of keys: without the GIL, on several threads, and all or nothing.

`batch_kernels` has the phases, the threads, the undoing and the plain operations. `aggregation_kernels`, `ttl_kernels`
and `map_kernels` bring their own last stage. `gather_kernels` makes columns of the entries that a call has found.
"""
