"""Operations on tensors of a device: they run in host memory, and a stream of the device waits for them."""
