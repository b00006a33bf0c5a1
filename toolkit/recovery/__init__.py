"""Recovery: adapters that give a model with thresholded activations its quality back.

python -m toolkit.recovery smollm2-135m --zeros 0.8 0.85 0.9 --out data/models
"""
