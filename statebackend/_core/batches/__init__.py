"""Operations on whole batches of keys: without the GIL, on several threads, and all or nothing.

`kernels` has the phases, the threads, the undoing and the plain operations. `adding_kernels`, `expiring_kernels` and
`map_kernels` bring a last stage of their own. `gathering` makes columns of what a call has found.
"""
