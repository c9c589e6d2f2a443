// Moves a random state past the numbers that a launch drew, so that the next one, or the next replay of a graph, draws others.

extern "C" __global__ void philox_advance(unsigned long long* state, long long n_blocks) {
  state[1] += static_cast<unsigned long long>(n_blocks);
}
