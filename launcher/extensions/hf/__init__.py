"""Tasks with models and data of Hugging Face: hf_causal_lm, hf_classifier, llama."""
