"""GR00T N1.7: Qwen3-VL features refined once an observation, a diffusion transformer over state and actions (NVIDIA/Isaac-GR00T)."""
