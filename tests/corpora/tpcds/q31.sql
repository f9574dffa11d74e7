-- Counties where the web grows faster than stores: two grouped tables, three times each.
with stores as (
  select ca_county, d_qoy, d_year, sum(ss_ext_sales_price) as sales
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join customer_address on ca_address_sk = ss_addr_sk
  group by ca_county, d_qoy, d_year
),
web as (
  select ca_county, d_qoy, d_year, sum(ws_ext_sales_price) as sales
  from web_sales
  join date_dim on d_date_sk = ws_sold_date_sk
  join customer_address on ca_address_sk = ws_bill_addr_sk
  group by ca_county, d_qoy, d_year
)
select
  s1.ca_county, s1.d_year,
  w2.sales / w1.sales as web_q1_q2_increase,
  s2.sales / s1.sales as store_q1_q2_increase,
  w3.sales / w2.sales as web_q2_q3_increase,
  s3.sales / s2.sales as store_q2_q3_increase
from stores as s1
join stores as s2 on s2.ca_county = s1.ca_county and s2.d_year = 2000 and s2.d_qoy = 2
join stores as s3 on s3.ca_county = s1.ca_county and s3.d_year = 2000 and s3.d_qoy = 3
join web as w1 on w1.ca_county = s1.ca_county and w1.d_year = 2000 and w1.d_qoy = 1
join web as w2 on w2.ca_county = s1.ca_county and w2.d_year = 2000 and w2.d_qoy = 2
join web as w3 on w3.ca_county = s1.ca_county and w3.d_year = 2000 and w3.d_qoy = 3
where s1.d_year = 2000 and s1.d_qoy = 1
  and case when w1.sales > 0 then w2.sales / w1.sales end
    > case when s1.sales > 0 then s2.sales / s1.sales end
  and case when w2.sales > 0 then w3.sales / w2.sales end
    > case when s2.sales > 0 then s3.sales / s2.sales end
order by s1.ca_county
