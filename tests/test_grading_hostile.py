r"""
Wrong answers that a policy could write to be graded True: none is. At least forty forms for each family of answers.
  python -m pytest tests/test_grading_hostile.py -q
A line of a table is a gold and the answers that are wrong for it, two or more spaces between them. A wrong answer is
another value, or says several, the right one among them, or is no value. What differs in spelling alone is right and
stands in RIGHT: `\boxed{x=2+2=4}` is 4.
"""
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.grading import grade

HOSTILE = {
    "what would be searched for": r"""
\frac{1}{2}  7\frac{1}{2}\\  3+\frac12\\  x=7\frac12\\  7\\\frac12  7\$\frac12\$  \frac12\\7  \frac12\;7  \%\frac12
\frac{1}{2}  \frac12\frac12\\
5  7\~(5\~)\~  7\~[5\~]\~  \text{not }\~(5\~)\\  7\(5\)  7\[5\]  6;5  5;6  5?6  7\to5  5|6  5\&6  5#6  5@  7\\5  5\\7
5  5\text{ billionths}  5 trillionths  5\text{ sextillion}  5\text{ octillions}
x+1  7\~(x+1\~)\~  x+1\text{ or }x  x+1\foo  7\\x+1  x+1\\7  \text{not }\~(x+1\~)\\  3\approx4\approx x+1  x+1|3
12  1'2  1"2  1''2  1\text{ }2  1\text{}2  x=1'2
90  (10)_{2}  (10)_2
20  (5)_2  (5)_{2}""",
    "functions, letters and signs": r"""
\sqrt2  \infty^{7}(\sqrt2)  \sqrt2\infty  \sqrt2+0\infty  \infty^0\sqrt2
\frac12  \frac{1}{2}\infty 7  \infty^{7}(\frac12)  \frac12\infty^0
1  \infty^0  2^\infty  1^\infty
x^2+2x+5=0  \emptyset  \{\}  \varnothing
45^\circ  9^\circ5  5^\circ 9  45^\circ1  1^\circ(45)
1800  60^\circ30  60^\circ(30)
3  e^{\log_2 3}  e^{\log 3}  e^{\log_{10}3}  (e)^{\log_2 3}  2^{\ln 3}  3^T  \left(3\right)^T  3^{T}
6  \log_2 16\cdot 4  \log_2 16\times 4  \log_2 16*4  \log_2 16 \cdot 2 \cdot 2  \log_2 8\cdot8  \log_3 81\cdot 9
\log_2 48  \log_2 6\cdot 8  \log_2 3\cdot16  \log_2 12\times 4
200  2e+2  2e + 2  20e+1
0  \frac{dy}{dx}  \frac{dx}{dt}  \frac{d}{dx}5  \frac{d}{dx}  \frac{dy}{dx}+0
3x^2  \frac{d}{dx}x^3  \frac{d}{dx}(x^3)  x^{2T}
2^{2008}-2  2^{2008}-2\pi  2^{2008}-2e  2^{2008}-2i  2^{2008}-3  2^{2008}-2_7
3^{2007}  3^{2007}_7  3^{2007}_{11}  \left(3^{2007}\right)_7
3\pm\sqrt2  \frac{6\pm\sqrt2}{2}  3+\sqrt2  \frac{3\pm\sqrt8}{2}
(1,1),(-1,-1)  (\pm1,\mp1)  (\pm1,1)  (1,\pm1)
\text{A, C}  A,B,C  \text{A, B}  A""",
    "products": r"""
5  3(2)  (3)(2)  (3)2  3[2]  [3][2]  3{2}  {3}(2)  \left(3\right)\left(2\right)  3\{2\}  (3)\,2  3\left(2\right)  2(3)
5  [2](3)  6(-1)  (6)(-1)  (2)(2)(1)  1(2)(2)
-5  (-3)(2)  -3(2)  (-3)2  -(3)(2)  (-2)[3]
12  3(4)(5)  (3)(4)(5)  3(4)5
\frac72  3(\frac12)  (3)\frac12  3{\frac12}  (3)(1/2)  3\cdot\frac12  [3]\frac12  \left(3\right)\frac12
\frac{13}{2}  3\frac72  3(\frac72)  (3)(7/2)  (3)\frac72
5x  3(2)x  (3)(2)x  x(3)(2)  x3(2)
5\pi  3(2)\pi  (3)(2)\pi  \pi(3)(2)
(5,1)  (3(2),1)  ((3)(2),1)""",
    "tiny differences": r"""
(\frac56)^{200}  (\frac56)^{199}  (\frac56)^{201}  (\frac65)^{200}  (\frac16)^{200}  -(\frac56)^{200}  10^{-16}  0
\frac{1}{2004!}  \frac{1}{2000!}  \frac{9}{2004!}  -\frac{1}{2004!}  (\frac{1}{2004!})^2  0  \frac{1}{2004!}+10^{-99}
\frac{1}{2^{98}}  \frac{1}{2^{99}}  -\frac{1}{2^{98}}  \frac{1}{4^{98}}  \frac{3}{2^{98}}  0  10^{-98}  \frac{1}{98^2}
1-2^{-60}  1-2^{-61}  1  1+2^{-60}  1-3^{-60}  0.999999999999999999
1-2^{-250}  1-2^{-251}  1  1+2^{-250}  1-3^{-250}
e^{-40}  e^{-41}  -e^{-40}  0  2e^{-40}  \pi^{-40}
\pi  3.141592653590  3.14159265358979  3.14159265358979323846264338327950288  \pi+10^{-30}  \pi(1-10^{-40})
\sqrt2  1.4142135623731  1.41421356237309504880168872421  \sqrt2+e^{-50}  \sqrt{2+10^{-30}}
\frac{x}{2^{98}}  \frac{x}{2^{99}}  \frac{3x}{2^{98}}  -\frac{x}{2^{98}}  0
2^{-60}i  2^{-61}i  -2^{-60}i  2^{-60}
[0,2^{-60}]  [0,2^{-61}]  [0,2^{-60})
\{2^{-60},\pi\}  \{2^{-61},\pi\}
\begin{pmatrix}10^{-30}\\1\end{pmatrix}  \begin{pmatrix}10^{-31}\\1\end{pmatrix}
y=10^{-20}x  y=10^{-21}x""",
    "equations and chains": r"""
4  1=2=3=4  banana=4  x^2+y^2=4  x+y=4  xy=4  ab=4  0=4  5=4  4=5  x=5=4  x=4=5  x=y=4  x=x=4  x=x+4  x=4x  2x=4  x^2=4
4  -x=4  1/x=4  f(x)=x=4  f(x,y)=4  (x,y)=4  |x|=4  \sqrt{x}=4  \text{banana}=4  a+b+c=4  2+2=5=4  5==4  \pi=4  x(2)=4
4  \lim_{x\to0}f(x)=4  x=4,y=5  y=5,x=4  x=4,4  \{x=4\}  x\ne4  x<4  x\le 4  3<4  \ne4  !=4  5\approx4  5\equiv4  x\to4
4  x=5\Rightarrow x=4  x=5\implies x=4  5\to4  5\iff4  x>3=4  4=4=5=4  4=-4  x=4=-4  \sin x+1=4  x-4=4
3  x+y=3  x+y=3=3  y=x=3  2x=3  3=x=3  x^3=3  3x=3  x=3x
x=1  y=1  x=2=1  x=1=2  x=x=1  x^2=1  1=1  x=x  1=0  x+y=1  x(x-1)=0  banana=1  x_1=1
y=2x+3  y=5=2x+3  y=2x+3=5  2x+3=2x+3  z=2x+3  y=2z+3  2y=2x+3  y+1=2x+3  banana=2x+3  0=0
x^2+y^2=4  4  x^2+y^2=5=4  x^2+y^2=4=5  4=4  0=0  x^2-y^2=4  x^2+y^2\le4  x=2
x^2-2x+10=0  x^2+1=0  x^2+2=0  y^2+1=0  x^2-2x+11=0  1=0
x=1,y=2  2,1  (2,1)  \{1,2\}  x=2,y=1  y=1,x=2  x=1,x=2  a=1,b=2  x=1\text{ or }y=2  x=1  x=1,y=2,x=5  x=1,y=2,z=3""",
    "intervals": r"""
(-\infty,-3)\cup[0,\infty)  \frac{x}{x+3}\ge0  x(x+3)\ge0
(-2,2)  x^2<4  2x<4  x<2-x+x  |x|^2<4  4>x^2  x^2-4<0  -4<2x<4
(1,\infty)  x-1>0  2x>x+1  x>x-1  0<x-1
x<1\text{ or }x>2  x<1\text{ and }x>2  x<1 and x>2  x>2\text{ and }x<1
x>1\text{ and }x<3  x>1\text{ or }x<3  x<3 or x>1  x<1\text{ and }x>3
(1,2)  2,1  (2,1)  1<x  x<2  1\le x\le2  (1,2)\cup(3,4)  (1,2)\cup\{1\}  (1,2),(3,4)  (y,x)=(1,2)  (1,2)=(2,1)
(1,2)  (2,1)=(1,2)  (3,4)=(1,2)  x\notin(1,2)  (1,2)^c  (1,2)'  \{(1,2)\}  \{1,2\}  (1,2]  [1,2)  [1,2]  (1.2)  12
(1,2)  (1 2)  -(1,2)  2(1,2)  y=1,x=2  x=2,y=1  1 or 2  1\text{ or }2  (1,2) or 5  (1=1,2)  (0=1,2)  (3=1,4=2)  1>x>2
(1,2)  (1,1.5)\cup(1.5,2)  (1,2)\setminus\{1.5\}  (1,2)\cap(2,3)  (1,2)\text{ or }(2,1)  \text{(2,1)}  (x,2)  (1,2x)
(1,2)  1-2  \mathbb{R}\setminus(1,2)
[0,1)  \{0,1\}  0<x<1  x<1  x\ge0  (0,1)  [0,1]  (0,1]  [0,1)\cup\{1\}  [0,1)=(0,1]  [0,2)=[0,1)  [0,0.5)
[0,1)  [0,1)\cup[1,2)  x\ne[0,1)  x\notin[0,1)  [0,1)\text{ or }[0,1]  0\le x<1\text{ or }x>2  [1,0)  0\le x+y<1
[0,1)  [0,1)^2  [0,1)'  0
(-\infty,-2)\cup(3,\infty)  (-\infty,-2)  (3,\infty)  (-\infty,-2),(3,\infty)  (-\infty,-2)\cap(3,\infty)  (-2,3)  x>3
(-\infty,-2)\cup(3,\infty)  (-\infty,-2]\cup(3,\infty)  [-\infty,-2)\cup(3,\infty]  x<-2\text{ and }x>3  3<x<-2  x\ne3
(-\infty,-2)\cup(3,\infty)  (-\infty,-2)\cup(3,\infty)\cup\{0\}  \mathbb{R}\setminus(-2,3)  (-\infty,\infty)  |x|>3
x>3  3  x=3  x\ge3  x<3  3>x  x>3,x<5  5>x>3  [3,\infty)  (3,4)  x>3\text{ or }x<2  x>3=4  x^2>9  |x|>3  x=3,x>3  4>3
x>3  1>0""",
    "sets": r"""
\{1,2\}  (1,2)  (2,1)  [1,2]  x=1,y=2  y=1,x=2  x=1\text{ or }x=3  \{1\}  \{2\}  \{1,2,3\}  \{1,2\},\{3\}
\{1,2\}  \{1,2\}\cup\{3\}  \{1,2\}\cap\{1\}  \{1,2\}\setminus\{1\}  \{\{1,2\}\}  \{\{1\},\{2\}\}  \{\{1\},2\}
\{1,2\}  \{1,\{2\}\}  \{(1,2)\}  \{1,2,\ldots\}  \{1,2,...\}  \{1,2,\dots\}  \{1,...,2\}  \{1,\cdots,2\}  \{12\}
\{1,2\}  \{1.2\}  \{1 2\}  \{1|2\}  \{1,2\}=\{3\}  \{3\}=\{1,2\}  A\ne\{1,2\}  x\notin\{1,2\}  \{1,2\}'  \{1,2\}^c
\{1,2\}  2\{1,2\}  -\{1,2\}  \{-1,-2\}  \{1,3=2\}  \{1=2,2\}  \{a=1,b=2\}  \{x+y=1,2\}  \{banana=1,2\}
\{1,2\}  \{1,2\}\text{ or }\{3\}  \{1,2\},3  3,\{1,2\}  |\{1,2\}|  1\pm1  \{1\text{ or }3\}  \emptyset  \{\}
\{1,2\}  \{1,2,\emptyset\}  \mathbb{N}  \{x|1\le x\le2\}  \{1\}\cup\{3\}  x\in(1,2)  x\in[1,2]  \{1_3,2\}\cup\{3\}
\{1,2\}  \{1,2\}\times\{1\}  \text{1 or 3}  1<x<2  1\le x\le2  1<x\le2  x>1,x<2
\{(1,2),(3,4)\}  \{(1,2),(4,3)\}  \{(2,1),(4,3)\}  \{1,2,3,4\}  \{(1,3),(2,4)\}  (1,2)  \{(1,2)\}
x\in\{2,3\}  (2,3)  2<x<3  [2,3]
x=2\text{ or }x=3  2<x<3  x^2-5x+6<0
\pm1  |x|<1  -1<x<1  (-1,1)  [-1,1]  |x|\le1
\{5\}  \{5,6\}  5\text{ or }6  \{5=6\}  \{6=5\}  \{5,...\}  \{5\}'  \{\{5\}\}  x\notin\{5\}  \{-5\}""",
    "units": r"""
5\text{ cm}  5 mm  5\text{ m}  5\text{ km}  5\text{ dm}  5\text{ nm}  5\text{ micrometers}  5\text{ decimeters}
5\text{ cm}  5\text{ inches}  5\text{ cm}^2  5\text{ cm}^3  5\text{ cubic cm}  5\text{ sq cm}  5\text{ cm squared}
5\text{ cm}  5\text{ cm cubed}  5 cm^2  50\text{ mm}  5\text{ cm/s}  5\text{ cm per second}  5\text{ per cm}
5\text{ cm}  5/\text{cm}  5\text{ kg}  5\text{ s}  5\%  5^\circ  \$5  €5  £5  5\text{ radians}  5\text{ tons}
5\text{ cm}  5\text{ acres}  5\text{ pints}  5\text{ newtons}  5\text{ volts}  5\text{ Kelvin}  5\text{ Celsius}
5\text{ cm}  5\text{ hours}  5'  5''  5"  5\text{ ft }1\text{ in}  5\text{ cm or 6 cm}  5m  5km
5\text{ cm}  5\text{ cm}, 6\text{ cm}  6\text{ cm}  -5\text{ cm}  5\text{ cm}+1  5\mathrm{~km}  5\mathrm{mm}
5\text{ cm}  5\text{cm}^4  5°
60^\circ  60\text{ rad}  60\text{ radians}  60'  60''  60\pi  \frac{\pi}{3}  60\text{ minutes}  60\%  120^\circ
60^\circ  300^\circ  60^\circ\text{ or }120^\circ  60^\circ,120^\circ  60^\circ 30'  -60^\circ  \pm60^\circ
60^\circ  \cos60^\circ  60\text{ cm}
60\text{ mph}  60\text{ km per hour}  60\text{ feet per second}  60\text{ kilometers}  60\text{ hours and 5 minutes}
4  4\text{ squared}  4\text{ cubed}  4\text{ factorial}  4\text{ thousand}  4\text{ millions}  4\text{ tenths}
4  4\text{ dozens}  4\text{ hundredths}  4\text{ halves}  4 hundreds  4 dozen  4 quadrillion  4\text{ lakh}  4 crore
4  4 gross  4 score  4 eighths  4\text{ sevenths}  4 ninths  4\text{ bn}  4 halved  4 doubled  4\text{ trebled}
4  4 reciprocal  4\text{ inverse}  4 fourths  4\text{ twelfths}  4 twentieths  4 sixteenths  4 tens  4 tenfold  4 bil
4  4 googol  4\text{ fivefold}  4 thousandths  4\text{ root}  4\text{ negative}  4 squared  4k""",
    "percent": r"""
50\%  5\%  500\%  0.5\%  0.05  5000\%  50\%\%  50\%x  50\%+1  50\%^2  -50\%  150\%  \frac12\%  \frac{50}{100}\%
50\%  50\%/100  50\%\text{ or }60\%  50\%,60\%  50\%=60\%  60\%=50\%  50=0.5  50=5\%  0.5=5  50\text{ per mille}  50‰
50\%  50\permil  50\text{ basis points}  50-60\%  50\text{ to }60\%  50\%\pm1\%  50.1\%  49.9\%  1/50  50\text{ cm}
50\%  50^\circ  \$50  50\%\text{ or not}  50\%\text{ cm}  50\%...  50\%\text{ not}  x=5\%  2  5  0.005  200\%
50\%  50\%\text{ of }10  50\%'
0.05  5  0.05\%  0.5\%  50\%  500\%  5\%\text{ or }6\%  5\%,6\%  5\%\%  5‰  5\text{ per mille}  5\text{ basis points}
\frac12  0.5\%  \frac12\%  .5\%  \frac{1}{2}\text{ percent}  0.5\text{ percent}  5\%  2\%  50\%=5
12.5\%  12.5\text{ per mille}  1.25\%  1.25  12.5\%\text{ or }13\%  125\%  12.5\%=12\%  12,5\%  0.0125  12\%  13\%
12.5\%  12.5'""",
    "mixed numbers": r"""
2.5  2\frac{1}{5}  2 5  2,5  25  2\cdot5  2..5  2.5.0  2\frac{1}{2}\frac{1}{2}  2\times\frac12  2\cdot\frac12
2.5  2(\frac12)  2(1/2)  2\left(\frac12\right)  \frac{1}{2}2  2*1/2  -2\frac12  2-\frac12  2\frac{2}{1}  2\frac{-1}{2}
2.5  2 1/3  2\frac{1}{3}  2/1/2  21/2  2\frac{1}{2}^2  2^\frac12  2,\frac12  2;5  2:5  2'5  3\frac12  2\frac14
2.5  \frac{2}{5}  \frac{21}{2}  2_{1/2}  2.5\ldots  2.5...  2.5e1  2.\overline{5}  2.50000001  2.49999999
2.5  2\frac12\text{ or }3  2\frac12=3  3=2\frac12  2\frac12!
1\frac{3}{4}  \frac{13}{4}  13/4  1\cdot\frac34  1\times\frac34  \frac34  1(\frac34)  1(3/4)  1\left(\frac34\right)
1\frac{3}{4}  1*3/4  1,\frac34  1\text{ or }\frac34  1-\frac34  -1\frac34  1\frac{4}{3}  1\frac{3}{5}  1.34  1.3/4  1 34
1\frac{3}{4}  134  1:3:4  2\frac34  11\frac34  1 1\frac34  1\frac{3}{4}x  1^{\frac34}  1\frac{3}{4}=2  1/\frac34
1\frac{3}{4}  3\frac14  (1\frac34)^2""",
    "bases": r"""
1010_2  1010_{3}  10_{10}  A_{16}  12_8  10  1010_{10}  1010_{16}  101_2  10100_2  1011_2  1010.1_2  -1010_2  1010_{23}
1010_2  1010_2\text{ or }10  1010_2,10  1010_2=11  11=1010_2  1010_2=1010_3  1010_x  1010^2  1010\text{ base }3
1010_2  (1010)_3  1010\text{ base three}  1010\text{ in base three}  1010\text{ cm}  1010\%  1010x  2_{1010}  {1010}_3
1010_2  1010_2+1  1010\text{ decimal}\ldots  \text{1010}_3  1010_{\text{three}}  1{,}010_3  |1010|_3  1010_2'
10  10_2  1010_2  10_{16}  10_{8}  10_{9}  (10)_2  {10}_2  \text{10}_2  10_{\text{two}}  10\text{ base }2
10  10\text{ base two}  10\text{ binary}  10\text{ in binary}  10\text{ hex}  10 binary  10 base 2  10 base two  0x10
10  0b10  0b1010  10_b  10_{-2}  10_{2}0  10_2+0  10_2\cdot1  x=10_2  10_2=10  10=10_2  10_2\text{ cm}  10_2\%  \{10_2\}
10  10_1  10_{10}_2
10,20  10_2,20  10_3,20_3  10,20_3  10_2,20_{10}""",
    "lists": r"""
1,2  1,2,3  1,2,2  1,1,2  1,2,1  1 2  1/2  1.2  12  1,2=3  3=1,2  1=3,2  1=2,2=1  x+y=1,2  banana=1,banana=2
1,2  banana=1,kiwi=2  1,2 or 3  1 or 2 or 3  1,\ldots,2  1,...,2  1,2,...  1,2,\ldots  1-2  1\pm1  (1,2),(1,2)  (1,2),3
1,2  1,2\text{ are wrong}  1,\text{ not }2  not 1,2  1,\ne2  1<2  1\to2  -1,-2  1,-2  \pm1,2  1,3,2  11,2  x>1,x<2
1,2  x\in(1,2)  x\in[1,2]  1+2  (x-1)(x-2)  (x-1)(x-2)=0  \{1\},\{2\}  1  2  1=1,2=2  1=1=1,2  0=1,2  2=1,2
45,45,90  45,90,90  45,90  45,45,45  45,45,90,90  90,90,45  \{45,90\}  45,45  90,45,90  45=90,45,90
1,1,2  1,2,2  1,2  2,2,1  \{1,2\}  1,1  1,1,2,2
\sqrt2,\sqrt2,1  \sqrt2,1,1  \sqrt2,1  \sqrt2,\sqrt2  1,1,\sqrt2
(1,2),(3,4)  (1,2),(4,3)  (2,1),(3,4)  (1,2)  (1,2,3,4)  1,2,3,4  (1,3),(2,4)  (1,2),(3,4),(5,6)  (1,2),(3,4),(1,2)
(1,2),(3,4)  (y,x)=(1,2),(3,4)  (1,2)=(3,4)  (3,4)
(1,2,3)  3,2,1  (3,2,1)  \{1,2,3\}  x=3,y=2,z=1  (1,2),3  ((1,2),3)  (c,b,a)=(1,2,3)  (a,b,c)=(3,2,1)  1 or 2 or 3""",
    "letters": r"""
R-r  r-R  0  R-R  r-r  2R  r  R  r+R  R-r+1  -R+R
\frac{R}{r}  1  \frac{r}{R}  \frac{R}{R}  \frac rR  r/R  \frac{r}{r}
Rr  r^2  R^2  rr  RR  2R  2r
N-n+1  1  n-N+1  n-n+1  N-N+1  N+n+1
a+A  2a  2A  a  A^2
2x  2x'  2x''  2x^\prime  2x^{\prime}
1  \frac{N}{n}  A/a  \binom{N}{n}
\gamma  \Gamma
\Delta x  \delta x
2X  2x  x+x
y=2x  y'=2x  y''=2x  y=2x'  y^\prime=2x
f(x)=x+x  f'(x)=2x  f''(x)=2x  f^{\prime}(x)=2x""",
    "ratios": r"""
1:2:3  1:6  \frac{1}{6}  1/6  3:2:1  1:2  1:2:4  1:3:2  6  (1,2,3)  1,2,3  1:2:3:4  2:2:3  0:0:0  1:2:x
2:3:4  1:6  \frac16  4:3:2  2:3  2:3:5  3:4:5  4:6:9  2:3:4:5  \frac{2}{3}:4  2:3/4  24
1:1:\sqrt2  1/\sqrt2  \frac{\sqrt2}{2}  1:\sqrt2:1  1:1  \sqrt2:1:1  1:1:2  2:2:\sqrt2  1:\sqrt2
3:2:1  1.5  3/2  1:2:3  3:2  6:4:1  3  \frac{3}{2}  3:1:2""",
    "case": r"""
\frac{abc}{4R}  \frac{abc}{4r}  \frac{ABC}{4R}  \frac{Abc}{4R}  \frac{abC}{4R}
2R  2r
2r  2R
\sin A  \sin a
\sin a  \sin A
32R^2 - 3(a^2 + b^2 + c^2)  32r^2 - 3(a^2 + b^2 + c^2)  32R^2 - 3(A^2 + b^2 + c^2)
2X  2x  x+x
3R^2  3r^2  3rR  3r^2+0
K=8n  K=8N
a+bn  A+bn  a+Bn  a+bN  A+Bn  A+BN
\frac{m}{n}  \frac{M}{n}  \frac{m}{N}  \frac{M}{N}
x^2+y  X^2+y  x^2+Y  X^2+Y
\sqrt{ab}  \sqrt{Ab}  \sqrt{aB}  \sqrt{AB}
\log_2 n  \log_2 N
n!  N!
(a,b)  (A,b)  (a,B)
\{a,b\}  \{A,b\}  \{a,B\}
x>a  x>A
V=\pi r^2h  V=\pi R^2h  V=\pi r^2H  V=\pi R^2H  V=\pi rRh
R+r  R+\mathrm{R}  \mathrm{r}+r
\frac{abc}{4R}  \frac{abc}{4\mathrm{r}}  \frac{\mathrm{A}bc}{4R}
N-n  \mathrm{n}-n  \mathrm{N}-N""",
    "lists of long numbers": r"""
60, 120  60000+120  60120  60\,120  60{,}120  60, 121  60  120  60, 120, 180  \{60120\}  60.120
60000+120  60, 120
2, 100  21\cdot 100  2100  2\,100  2{,}100  2~100  2\ 100  2,\! 100  2{,}\!100
21\cdot 100  2, 100  \{2, 100\}
\{2,100\}  \{2100\}  2100  \{21\cdot 100\}  \{2\,100\}  (2,100)  \{2,100,0\}  \{2\}
60^\circ, 120^\circ  60, 130  60  60120^\circ  60120  60\text{ cm}, 120\text{ cm}  60, 120\text{ rad}
5\text{ cm}, 6\text{ inches}  5\text{ inches}, 6\text{ cm}  5\text{ cm}, 6\text{ cm}
5\text{ cm}, 6\text{ cm}  5\text{ cm}, 6\text{ km}  5\text{ km}, 6\text{ km}  5, 7
(1,100)  1100  1,100  (1100)  \{1,100\}
12, 345, 678  12345678  12, 345678  12345, 678""",
    "inequalities": r"""
(-\infty,-2)\cup(3,\infty)  x<-2\text{ and }x>3  x<-2\text{ or }y>3  x\le-2\text{ or }x>3  x<-2\text{ or }x>4  x<-2
(-\infty,-2)\cup(3,\infty)  -2<x<3  x<-2, x\ge3  \{x: x<-2\}  \{x: x<-2\text{ and }x>3\}  x\ne-2, 3  x<-2 \land x>3
(2,5)  x>2\text{ or }x<5  x>2, x<6  x>2, y<5  x<2, x>5  x>2, x\le5  x\ge2\land x<5  x>2  x<5
\mathbb{R}\setminus\{2\}  x\ne 3  x\ne 2, 3  x=2  x>2  \mathbb{R}  x<2, x\ge2
(-\infty,-2)\cup(-2,2)\cup(2,\infty)  x\ne-2\text{ or }x\ne2  x\ne2  x\ne\pm3  -2<x<2  x\ne-2,2,5
x<-2\text{ or }x>3  y<-2\text{ or }y>3  x<-2\text{ and }x>3
\{-1\} \cup [0,7)  x=1\text{ or }0\le x<7  x=-1\text{ and }0\le x<7  x=-1\text{ or }0<x<7  0\le x<7
x\ne2  2  x=2
x>2, x<5  (2,6)  (-\infty,5)\cup(2,\infty)
(-\infty,-2)\cup(3,\infty)  x<-2\text{ or }x>3\text{ and }x>5  x<-2\lor x>3\land x>5
(1,3)  x=1, x=3  x=1\text{ or }x=3
1<x<4  4>x>2  1<x^2<16  1<x<y<4
f(2)<f(1)<f(4)  f(1)<f(2)<f(4)  f(2)<f(4)<f(1)
(-\infty,2)\cup(3,\infty)  (-\infty,3)\text{ or }(3,\infty)  \left\{x\;\middle|\;x\leqslant 2\text{ or }x>3\right\}
\mathbb{R}\setminus\{2\}  \text{all real numbers except }3  \text{all real numbers}  x\not=3""",
    "words around": r"""
36  \text{36 or 37}  \text{36 million}  \text{not 36}  \text{36 percent of 5}  \text{35 dollars}  \text{36 dozen}
5\text{ cm}  \text{5 km}  \text{6 cm}
2430_5  (2430)_6  2430_{(6)}  2430\text{ (base 6)}  2430_{\text{six}}  2430\text{ base six}  (2430)_{25}
2430_5  2431\text{ (base 5)}  243_5
2430  2430\text{ (base 5)}  (2430)_5  2430_{\text{five}}
\textbf{(D)}\ 27  C  28  \textbf{(C)}\ 27  \textbf{(D)}\ 28  \text{(C)}  (C) 27
27  \textbf{(D) }28  D  \text{(D)}  (D) 28  \text{(D) 28}
\frac13  0.\dot{4}  0.3\dot{4}  \dot{3}  3.\dot3  0.0\dot{3}  \dot{0}.3
\frac17  0.\dot{1}4285\dot{6}  0.\dot142857
e-1  \mathrm{e}+1  \mathrm{i}-1  \mathrm{e}
\ln 2  \operatorname{ln} 3  \operatorname{log}_2 2  \operatorname{sin} 2
101_2,110_2  101_3,110_2  101_2,110_3  (101)_3,(110)_3
101  \text{101 (base 2)}  101\ (\text{base }2)  101_{\text{base 2}}  [101]_2  \text{101 in base two}  (1)(01)_2
27  (\text{D})\ 28  D. 28  D) 28  \text{Option D: }28  \text{D) }28  \text{(D)}\text{(E)}
\text{(B)}  \text{(A)}\text{(B)}  A) B
(\mathrm{E})\,0  \textbf{(D)}\;0  D. 0
36  \text{36}^2  \text{36, 37}  \text{36m}^2x  {\rm 37}  \textcolor{red}{37}  \mathbf{37\text{ cm}}""",
    "towers": r"""
4  9^{9^{9^9}}  5^{5^{5^5}}  2^{10^9}  (10^9)!  (10^7)!  1000000!  \binom{10^9}{5\cdot10^8}  10^{10^{10}}  7^{7^{7^7}}+x
4  x^{9^{9^9}}  e^{9^{9^9}}  (\sqrt2)^{10^{9}}  (3/2)^{10^9}  ((10!)!)!  20!!!  (x+1)^{100000}  (1+\sqrt2)^{1000000}
4  \log(9^{9^9})  \sin(10^{10^{10}})  2^{2^{2^{2^{2^{2}}}}}  0.5^{10^9}  10^{-10^9}  \sqrt{9^{9^9}}  1.0000001^{10^{9}}
4  9^{9^{9^9}}-9^{9^{9^9}}+4  8^{8^{8^8}}  7^{7^{7^7}}  6^{6^{6^6}}  3^{3^{3^{3^3}}}  2^{10^{10}}  3^{10^9}  5^{10^8}
4  11^{11^{11}}  (10^6)!  (9^9)!  (8^8)!  200000!  123456789!  \binom{10^8}{10^7}  (x-1)^{99999}  (2x+y)^{50000}
4  12^{12^{12}}  13^{13^{13}}""",
    "or": r"""
5  5\text{ or }6  6\text{ or }5  5 or 6  5 or 5.5  either 5 or 6  5\lor6  5\vee6  5\text{ or possibly }6  5\text{, or }6
5  5or6  5\text{ and }6  5\textbf{ or }6  5\text{or}6  5\ or\ 6  5\mbox{ or }6  5\quad\text{or}\quad6  5\ \mathrm{or}\ 6
5  x=5\text{ or }x=6  x=5\text{ or }6  x=5\text{ or }y=6  x=6\text{ or }x=5  5\text{ or not}  5 OR 6  5 Or 6
5  5\text{ OR }6  5||6  5|6  5/6  5\\6  5\text{ xor }6  5\text{ oder }6  5 ou 6  5\text{ if }x=1  5\text{ if x is six}
5  5\text{ or none}  5\text{ or }\emptyset  5\text{ else six}  5\text{ otherwise }6  5\text{ unless six}  \text{5 or 6}
5  5~or~6  (5\text{ or }6)  \{5\text{ or }6\}  5\text{ but maybe six}  5\text{ maybe six}  5 maybe six  5 (or 6)
5  5 but not 6  5;6  5:6  5\pm1  5\cup6
(1,2)  1\text{ or }2  1 or 2  (1,2)\text{ or }(2,1)  (1\text{ or }2)
x=1,y=2  x=1\text{ or }y=2  x=1 or y=2  x=1,y=2\text{ or }x=2,y=1
\{1,2\}  \{1,2\}\text{ or }\{1\}  1\text{ or }3  \{1,2\}\text{ or }3  \{1\}\text{ or }\{2\}
\text{Evelyn}  Evelyn or Dana  \text{Dana or Evelyn}  \text{Evelyn or }\text{Dana}  Evelyn, Dana  Evelyn/Dana
\text{(B)}  A or B  B or C  \text{(A) or (B)}  B\text{ or }C  A,B  A=B""",
    "text around": r"""
4  4\text{ plus one}  4\text{ minus one}  4\text{ times ten}  4\text{ not}  4\text{ is wrong}  4\text{ is not it}
4  4\text{ maybe}  4\text{ by five}  4\text{ point five}  4\text{ over two}  4\text{ divided by two}
4  4\text{ if x is five}  4\text{ five}  4\text{ at least}  4\text{ at most}  4\text{ remainder one}
4  4\text{ below zero}  4\text{ base five}  4\text{ repeating}  4 plus one  4 minus one  4 times ten  4 not
4  4 point five  4 over two  4 remainder one  4 but maybe five  4 five  4 negative  \text{not }4  not 4
4  \text{maybe }4\text{ or }5  \text{4, 5}  \text{4}5  \text{5}4  4\text{5}  4\text{.5}  4$5$  $4$$5$  4 (5)  5 (4)
4  (4)(5)  4[5]  4~5  4\;5  4\quad5  4?5  4\&5  4\text{ versus }5  4 vs 5  4...  4\ldots  4\dots  4'  \overline{45}
\text{Evelyn}  Evelyn and Dana  not Evelyn  \text{not Evelyn}  \text{Evelyn}\text{Dana}  Dana Evelyn  Evelyn=Dana
\text{Evelyn}  Dana=Evelyn  \text{Evelyn}^2  Evelyn (not Dana)  \text{maybe Evelyn}  EvelynEvelyn  \neg\text{Evelyn}
\text{Evelyn}  Evelyn's
\text{(B)}  \text{not B}  BB  AB  B.5  (A)(B)  B'  \text{B}\text{C}  B=C  A=B  \overline{B}  (B) 5  2B  ABCDE  B_1""",
}
# whole completions: the last box counts, so a right answer in an earlier one, or in none, is no answer
BOXES = r"""
4  \boxed{4} \boxed{5}  \boxed{4}\boxed{5}  \boxed{4} or \boxed{5}  \boxed{4}, \boxed{5}  \boxed{4} and \boxed{5}
4  \boxed{4}=\boxed{5}  \boxed{4} \fbox{5}  \fbox{4} \boxed{5}  \fbox{4}\fbox{5}  \boxed {4} \boxed {5}
4  \boxed{4 \boxed{5}}  \boxed{4, \boxed{5}}  \boxed{4=\boxed{5}}  \boxed{\boxed{4},\boxed{5}}
4  \boxed{4\text{ or }\boxed{5}}  \boxed{4} \boxed{}  \boxed{4} \boxed{ }  \boxed{4} \boxed{?}  \boxed{4} \boxed{5
4  \boxed{4} \boxed{  \boxed{4 \boxed{  \boxed{4  \boxed 5  4  \boxed{}4  \boxed{4,5}  \boxed{4}\boxed{4,5}  \boxed{4 5}
4  \boxed{4\ 5}  \boxed{4\\5}  \boxed{4&5}  \boxed{4;5}  \boxed{4} #### 5 \boxed{5}  #### 5  4 #### 5  #### 4 5
4  #### 4 or 5  #### 4, 5  #### 4=5  #### 5=4  #### 4 #### 5  #### 4 \boxed{5}  \boxed{5} #### 4  \boxed{4\text{ or }5}
4  \boxed{\text{4 or 5}}  \boxed{4 \text{ and } 5}  \boxed{5=4}  \boxed{4}\boxed{5}\boxed{6}  \boxed{5} 4  4 \boxed{5}
4  \boxed{"4" or "5"}  \boxed{\{4\},\{5\}}  \boxed{4 $\boxed{5}$}  \Boxed{4}  \box{4}  boxed{4}  \boxed(4)  \boxed[4]
4  \boxed\{4\}  \framebox{4}  Answer: 4"""
# gold, then answers that are the same in another spelling: what the rules above must not lose
RIGHT = r"""
\frac{2\sqrt3}{3}\%  \frac{2}{\sqrt3}\%
16  \log_2 16\cdot 4  \log_2 16\times 4  e^{\ln16}  2^{\log_2 16}
\sin 2x  2\sin x\cdot\cos x  2\sin x\cos x  \sin(2x)
\frac{\sqrt3}{4}  \sin 60^\circ\cdot\cos 60^\circ
\pi  4\arctan 1  \arctan 1\cdot4  \pi(1)
2e+2  2(e+1)  2e + 2
e^{e-1}  \frac{e^e}{e}  e^{e}e^{-1}
0.00001  1e-5  1e-05  10^{-5}
0.0000025  2.5e-6  2.5E-6
ad-bc  da-bc  -cb+da
2d  d\cdot 2  d2
3\pm\sqrt2  \frac{6\pm\sqrt8}{2}  3+\sqrt2,3-\sqrt2
\frac{3+\sqrt5}{2},\frac{3-\sqrt5}{2}  \frac{3\pm\sqrt5}{2}
(1,-1),(-1,1)  (\pm1,\mp1)  (\mp1,\pm1)
\text{(A), (C)}  A,C  \text{A, C}  \text{C, A}
6  3(2)  (3)(2)  (3)2  3[2]  {3}(2)  \left(3\right)\left(2\right)  (-3)(-2)  1(2)(3)
-6  (-3)(2)  -3(2)  3(-2)
\frac32  3(\frac12)  (3)\frac12  1\frac12  (1)(1\frac12)
6x  3(2)x  (3)(2)x  3\cdot2x
\frac72\pi  3\frac12\pi  3.5\pi
x<1\text{ or }x>2  x<1 or x>2  x<1,x>2  x>2\text{ or }x<1
x>1\text{ and }x<3  x>1,x<3  x<3\text{ and }x>1
(\frac56)^{200}  \frac{5^{200}}{6^{200}}  (\frac65)^{-200}  (\frac{25}{36})^{100}
\frac{1}{2004!}  \frac{2005}{2005!}
\frac{1}{2^{98}}  2^{-98}  4^{-49}  \frac{2}{2^{99}}
e^{-40}  \frac{1}{e^{40}}
\frac{\sqrt2}{10}  0.1\sqrt2  \frac{1}{5\sqrt2}
\sqrt2+\sqrt3  \sqrt{5+2\sqrt6}
e^{i\pi/3}  \frac12+\frac{\sqrt3}{2}i
\sqrt[3]{7+5\sqrt2}  1+\sqrt2
\frac{x}{2^{98}}  2^{-98}x  0.5^{98}x
1.5\pi  \frac{3\pi}{2}
4  x=4  f(x)=4  f(2)=4  f'(2)=4  a_n=4  x_1=4  AB=4  \overline{AB}=4  \angle ABC=4  m\angle A=4  \theta=4  P(A)=4
4  S_{10}=4  2+2=4  x=2+2=4  4=4  \log_2 16=4  x=2+2  4\text{ pairs}  4 eggs  4\text{ two-digit numbers}  [ABC]=4
4  |AB|=4  \{4\}  x\in\{4\}  (x=4)  m=4 cm  m=4\text{ m}  h=4\text{ hours}  \frac{dy}{dx}=4
R-r  -r+R  R-1r
\frac{R}{r}  R/r  \frac{2R}{2r}
2X  X2  X+X
2x  f'(x)=2x  y'=2x  f^{\prime}(x)=2x
x+R+r+\sqrt{2}  r+R+x+\sqrt2
\mathbb{R}  \mathbb R
Rr  rR
1:2:3  2:4:6  1 : 2 : 3  \frac12:1:\frac32
1:1:\sqrt2  2:2:2\sqrt2  1:1:\sqrt{2}
2:3  4:6  2/3
\Phi+1  1+\Phi
1  2(\frac12)  2(1/2)  \frac12\cdot2  100\%
2.5  2\frac12  2+1/2  2\frac{3}{6}  2.5\%  2½  5/2
\frac12  \sin\theta=\frac12  P(A)=\frac{3}{6}=0.5  50\%  \frac12=50\%  \cos A=0.5
\frac{x_1+x_2}{2}  x=\frac{x_1+x_2}{2}
(1,2)  x=1,y=2  y=2,x=1  (x,y)=(1,2)  (y,x)=(2,1)  x=(1,2)  1<x<2  x\in(1,2)  (a=1,b=2)
[0,1)  0\le x<1  x\in[0,1)  1>x\ge0  0<=x<1
(-\infty,-2)\cup(3,\infty)  (3,\infty)\cup(-\infty,-2)  x\in(-\infty,-2)\cup(3,\infty)  \mathbb{R}\setminus[-2,3]
\{1,2\}  2,1  x=1,x=2  x=1\text{ or }x=2  A=\{2,1\}  x\in\{1,2\}  \{1\}\cup\{2\}  1\text{ or }2
1,2  2,1  x=1,2  x=1,x=2  1 or 2  \{1,2\}  1.5\pm0.5
45,45,90  90,45,45  45.0,90,45
(1,2),(3,4)  (3,4),(1,2)  (x,y)=(1,2),(3,4)  (1,2)\text{ or }(3,4)
x=1,y=2  y=2,x=1  1,2  (1,2)  x=1.0,y=\frac42
AB=9, CD=4  CD=4,AB=9  9,4
f(x)=x,f(x)=2-x  f(x)=2-x,f(x)=x  x,2-x
x=1  1=x  x-1=0  1
y=2x+3  2x+3=y  3=y-2x  2y=4x+6  y=2x+3+0
x^2-2x+10=0  2x^2-4x+20=0  -10=x^2-2x
60\text{ mph}  60\text{ miles per hour}  60
25\text{ cm}^2  25\text{ cm squared}  25\text{ sq cm}  25
50\%  50\text{ per cent}  0.5=50\%  50\text{ percentage points}
\$5  5\text{ dollars per hour}
\text{Evelyn}  x=\text{Evelyn}  "Evelyn"
10,000, 20,000  20000, 10000  20,000, 10,000  10000,20000
60, 120  120, 60  120,60  \{60,120\}  60\text{ and }120
\{2,100\}  \{100,2\}  2, 100  \left\{100, 2\right\}
\{2,100,300\}  \{100,2,300\}
60^\circ, 120^\circ  60, 120  120,60  120^\circ,60^\circ  60, 120^\circ
5\text{ cm}, 6\text{ cm}  5, 6  6, 5\text{ cm}
\frac{1,000}{2,001}  \frac{1000}{2001}
(-\infty,-2)\cup(3,\infty)  x<-2\text{ or }x>3  x>3 or x<-2  x<-2, x>3  x < -2 \lor x > 3  x<-2\cup x>3
(-\infty,-2)\cup(3,\infty)  \{x: x<-2\text{ or }x>3\}  \{x\in\mathbb{R}\mid x<-2\text{ or }x>3\}
x<-2\text{ or }x>3  (-\infty,-2)\cup(3,\infty)  x>3 \vee x<-2
(2,5)  x>2, x<5  2<x<5  x>2\text{ and }x<5  5>x>2  x>2\land x<5
x>2, x<5  (2,5)
\mathbb{R}\setminus\{2\}  x\ne 2  (-\infty,2)\cup(2,\infty)  x\neq 2  \mathbb{R}-\{2\}  \mathbb{R}\backslash\{2\}
x\ne 2  \mathbb{R}\setminus\{2\}  x<2\text{ or }x>2
(-\infty,-2)\cup(-2,2)\cup(2,\infty)  x\ne\pm2  x\ne 2,x\ne-2  x\ne -2\text{ and }x\ne2  x\ne -2, 2
\{-1\} \cup [0,7)  x=-1\text{ or }0\le x<7
e-1  \mathrm{e}-1  -1+\operatorname{e}  \text{e}-1
e^{i\pi}  \mathrm{e}^{\mathrm{i}\pi}
\ln 2  \operatorname{ln} 2  \operatorname{ln}2  \mathrm{ln}\,2  \text{ln}(2)  \operatorname{ln}(2)
\arctan 2  \operatorname{arctan} 2  \mathrm{arctan}(2)
(1,2),(3,4)  \{(1,2),(3,4)\}  \{(3,4),(1,2)\}  \left\{(1,2),(3,4)\right\}
\{(1,2),(3,4)\}  (1,2),(3,4)  (3,4)\text{ and }(1,2)
x  X
36  \text{36 dollars}  \text{36 apples}  \text{ 36 dollars }  \mbox{36 dollars}
5\text{ cm}  \text{5 cm}
2430_5  (2430)_5  2430_{(5)}  2430\text{ (base 5)}  2430\text{ base 5}  2430\text{ in base 5}  2430_{\text{five}}
27  \textbf{(D) }27  \text{(D) }27  \textbf{(D)}\ 27  \text{(D) 27}  \mathrm{(D)}\ 27  (D) 27
\textbf{(D)}\ 27  27  D  \text{(D)}  (D)  \textbf{(D) }27
\frac13  0.\dot{3}  0.\dot3  .\dot{3}
\frac17  0.\dot{1}4285\dot{7}
\frac16  0.1\dot{6}
111, \! 111, \! 111  111111111  111{,}\!111{,}\!111
10000  10\ 000  10~000  10\;000
(2,5)  \left\{x\;\middle|\;2<x<5\right\}  \{x\colon 2\lt x\lt 5\}
2<x\le 5  x ∈ (2,5]  5\geqslant x\gt 2
[5.8,6)  x\in[5.8,6)
(0,\frac{\pi}{2})\cup(\frac{\pi}{2},\pi)  0<t<\frac{\pi}{2}\text{ or }\frac{\pi}{2}<t<\pi
(-\infty,2)\cup(3,\infty)  (-\infty, 2)\text{ or }(3.0, \infty)  (-\infty,2)\bigcup(3,\infty)  (-\infty,2) U (3,\infty)
(-\infty,2)\cup(2,\infty)  x\not=2  x ≠ 2  \text{all real numbers except }2
(1,2),(3,4)  (x,y)=(1,2),(x,y)=(3,4)  (x,y)=(1,2)\text{ or }(x,y)=(3,4)  (1,2)\text{, }(3,4)
e^2  {\rm e}^2  \mathrm e^2
\ln 3  \operatorname*{ln} 3  {\rm ln} 3  \log_e 3
\sec 1  \operatorname{sec} 1
1+2i  1+2\imath  1+2{\rm i}
R+r  \mathrm{R}+r
36  \text{36m}  {36}  \textcolor{blue}{36}  \mathbf{36\text{ cm}}  36^\circ\text{C}  \text{x = 36}
34\text{ sq. units}  \text{34 sq. units}
12, 13  \text{12 and 13}
440\text{ cm}^2  \text{440 cm}^2
2430_5  \text{2430 in base 5}  2430 (base 5)  2430\ (\text{base }5)  2430_{\text{base 5}}  {2430}_5  [2430]_5
27  (\text{D})\ 27  D. 27  D) 27  \text{Option D: }27  \text{D) }27  \textbf{(D)}\ $27$  {\rm (D)}\ 27  \text{(D) $27$}
\text{(D)}  \text{Option D}  \textbf{\text{D}}  \text{D)}  d
(B)  b
\frac13  0.\overline 3  0.3̅  0.3̇
"""
# whole completions, as in BOXES
RIGHT_BOXES = r"""
5  \boxed{4}, no: \boxed 5  \boxed5  \boxed 5  \boxed{5} in \boxed form  \fbox 5  $\boxed 5$.
\pi  \boxed\pi  \boxed \pi
\frac12  \boxed\frac12  \boxed\frac{1}{2}  \boxed \frac12  $\boxed\frac{1}{2}$
12  $\boxed 12$  \boxed 12.
x  \boxed x
-5  \boxed -5"""


def pairs(table: str) -> list[tuple[str, str]]:
    lines = [re.split(" {2,}", line) for line in table.strip().splitlines()]
    return [(gold, answer) for gold, *answers in lines for answer in answers]


def patient(pair: tuple[str, str]) -> bool | None:
    """The verdict, asked for up to three times: on a busy machine a worker may run out of time."""
    for _ in range(3):
        if (verdict := grade(completion=pair[1], gold=pair[0])) is not None:
            return verdict
    return None


def graded(completions: list[tuple[str, str]]) -> dict[tuple[str, str], bool | None]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(completions, pool.map(patient, completions), strict=True))


def boxes(table: str) -> list[tuple[str, str]]:
    return [(gold, f"\\boxed{{{answer}}}") for gold, answer in pairs(table)]


@pytest.mark.parametrize("completions", [*map(boxes, HOSTILE.values()), pairs(BOXES)], ids=[*HOSTILE, "several boxes"])
def test_no_hostile_answer_is_true(completions):
    assert len(set(completions)) == len(completions) >= 40
    assert [pair for pair, verdict in graded(completions).items() if verdict is not False] == []


def test_other_spellings_of_right_answers_are_true():
    assert [pair for pair, verdict in graded([*boxes(RIGHT), *pairs(RIGHT_BOXES)]).items() if verdict is not True] == []
