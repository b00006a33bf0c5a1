"""Recovery: adapters that give a model with thresholded activations its quality back.

python -m toolkit.recovery smollm2-135m --zeros 0.8 0.85 0.9 --out data/models

One pass over the calibration articles, 239 thousand tokens, brings 80 % zeros to 1.144 times the dense perplexity (6
windows of 1024). Other attempts on the embedded model, which are not in the code:

- A second pass, at a quarter of the learning rate: divergence 0.21 instead of 0.22 nats on these articles, but 0.25 as
  before on others; 1.157 times. As many steps on text that the dense model itself wrote on: 1.166 times.
- 333 thousand tokens of other articles (the openings of ten thousand): 0.223 instead of 0.231 nats over 18 windows of
  articles that never trained, 1.138 instead of 1.146 times; over the 6 windows it is 1.147 both before and after. So
  more text gains little at these ranks.
- Neurons scaled by the root of their Fisher information, so that one threshold for all layers sorts them by what they
  are worth: 1.39 and 3.6 times instead of 1.42 and 5.3 at 80 and 90 % zeros with thresholds alone, but with adapters
  1.167 and 1.462 instead of 1.147 and 1.431.
"""
