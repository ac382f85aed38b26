"""Closed-form first and second derivatives, one file per operator, with the paper's printed formulas next to ours.

Shapes and letters as in the paper; the layout of Jacobians and Hessians is that of `curvature_gap.matrix_calculus`.
A function called `..._as_printed` transcribes the paper literally; where the paper is wrong its docstring says so.
"""
