"""lm-eval task files: `lm_eval run --include_path <this folder> --tasks jetrl_aime_2024,jetrl_math_500,jetrl_gsm8k`.

Each declares its own prompt, token budget, number of samples and the grader of verify.py; data as in data.py.
"""
