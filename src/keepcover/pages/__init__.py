"""Pages: figures and self-contained HTML reports of predictors, evaluations and audits."""
