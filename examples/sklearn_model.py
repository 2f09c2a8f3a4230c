"""Robust prediction sets around a scikit-learn pipeline, on measurements instead of images."""

import numpy as np
from sklearn.datasets import load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import keepcover
from keepcover.adapters.sklearn import RobustSetClassifier

# Features on one scale first: epsilon is one L2 length over all of them, here in standard deviations. The scale comes
# from rows of its own, since rows that calibrate must be as new to everything fitted as a query is.
X, y = load_wine(return_X_y=True)
train, test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=0)
scaler = StandardScaler().fit(train[:20])
train, test, y_train = scaler.transform(train[20:]), scaler.transform(test), y_train[20:]

sets = RobustSetClassifier(
    RandomForestClassifier(100), alpha=0.2, epsilon=0.25, sigma=0.5, draws=16, copies=20, random_state=0
).fit(train, y_train)
print(sets.guarantee_)
print(f"accuracy of predict: {sets.score(test, y_test):.2f}")

mask = sets.predict_set(test)
names = np.array(["barolo", "grignolino", "barbera"])
for row, truth in list(zip(mask, y_test, strict=True))[:5]:
    print(f"{names[truth]:<12} {{{', '.join(names[row])}}}")
covered = mask[np.arange(len(y_test)), y_test].mean()
print(f"coverage {covered:.2f}, mean size {mask.sum(axis=1).mean():.2f} of 3")

# The same predictor in keepcover's own vocabulary: saving, auditing.
report = keepcover.audit(sets.predictor_, (test.astype(np.float32), y_test), attacks=["random"], steps=20, draws=8)
print(report)
